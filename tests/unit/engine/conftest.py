from tests.support.models import smollm2_folder, tiny_llama_folder, tiny_qwen2_folder

__all__ = ["smollm2_folder", "tiny_llama_folder", "tiny_qwen2_folder"]
