"""The engine runs on the CPU where there is no GPU, its kernels in Triton's interpreter."""

from tests.support.models import tiny_llama_folder, tiny_qwen2_folder
from tests.unit.kernels import conftest as interpreter

__all__ = ["interpreter", "tiny_llama_folder", "tiny_qwen2_folder"]
