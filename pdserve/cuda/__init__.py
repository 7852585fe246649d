"""The engine on a CUDA GPU: weights, forward pass, graphs, memory, runner."""
