"""Each kernel of the GPU engine alone, against its own floor."""
