"""What workers have in common that are alike to the predictor, as one text."""

from pathlib import PurePath


def name_worker_class(
    *, device: str, model: str, dtype: str, tensor_parallel: int, pipeline_parallel: int
) -> str:
    """Returns the class of workers, as profiles and registrations name it.

    Args:
        device: `cpu`, or what the driver calls the GPU.
        model: folder or name; its last part counts.
        dtype: of weights and KV.
        tensor_parallel: ranks of a stage.
        pipeline_parallel: stages.
    """
    words = (device, PurePath(model).name, dtype, f"tp{tensor_parallel}", f"pp{pipeline_parallel}")
    return " ".join("-".join(word.split()) for word in words)
