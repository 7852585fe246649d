"""Kernels run through Triton's interpreter where there is no device."""

import os

import torch

if not torch.cuda.is_available():
    # Read when triton is first imported, which the tests beside this file do.
    os.environ["TRITON_INTERPRET"] = "1"
