"""The one error of a GPU, or of a library that drives it, that its users can work around."""


class DeviceFault(RuntimeError):
    """It refused; the text says which call and why."""
