"""Maps the tensors of a running model to the names in its files, where transformers keeps them in another form.

For example, transformers holds all experts of a layer in two tensors; the files hold three matrices per expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from slime.types.errors import NotAvailable
from slime.types.models.vision import vision_of

FIELD = "--model-path"


class _InPlace(torch.Tensor):
    """A tensor whose `contiguous` does not copy: transformers calls it on slices before it writes them to files, but
    here they must stay views."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else super().__torch_function__(func, types, args, kwargs)


def disk_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns views of the parameters and persistent buffers by their names in the files of a Hugging Face directory.

    A tied weight is included under each of its names. Together the views cover the whole model. Raises NotAvailable,
    naming a tensor, if the form of that tensor in the files cannot be a view of the model's.
    """
    state: dict[str, torch.Tensor] = model.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        # Before transformers 5, text models used the names in their files.
        if vision_of(model.config.to_dict()) is None:
            return state
        raise NotAvailable.requires("images", "the package transformers 5", "pip install 'transformers>=5'") from error
    try:
        views = revert_weight_conversion(model, {name: t.as_subclass(_InPlace) for name, t in state.items()})
    except Exception as error:
        raise _not_available(model, "the tensors", f": {type(error).__name__}: {error}") from error
    plain_views = {name: view.as_subclass(torch.Tensor) for name, view in views.items()}
    stored, reached = _elements(state.values()), _elements(plain_views.values())
    for name, tensor in [*plain_views.items(), *state.items()]:
        storage = tensor.untyped_storage().data_ptr()
        if stored[storage] != reached[storage]:
            raise _not_available(model, name)
    return plain_views


def _elements(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    """Returns the number of elements that the tensors cover in each storage; tied tensors count once."""
    distinct = {(t.untyped_storage().data_ptr(), t.data_ptr(), t.shape) for t in tensors}
    counted: Counter[int] = Counter()
    for storage, _, shape in distinct:
        counted[storage] += shape.numel()
    return counted


def _not_available(model: Any, what: str, why: str = "") -> NotAvailable:
    kind = model.config.model_type
    return NotAvailable(
        f"{FIELD}: the embedded engine cannot take new weights for {what} of a {kind} model by the names of its "
        f"files{why}",
        field=FIELD, value=kind, expected="a model whose files have its tensors, or parts of them",
    )  # fmt: skip
