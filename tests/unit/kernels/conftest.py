"""Mends Triton's interpreter, in which kernels run where there is no device."""

from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


# Triton 3.6 bounds a loop by int() of an array of one element, which numpy refuses since 2.4.
interpreter._patch_lang_tensor = _patch_tensor_with_index


def _restore_nothing(self: Any, *args: Any) -> None:
    """Tensors of the host are used in place. Copied onto themselves, which is what the interpreter
    does, those that processes share would lose what another one writes meanwhile.
    """


interpreter.GridExecutor._restore_args_dev = _restore_nothing
