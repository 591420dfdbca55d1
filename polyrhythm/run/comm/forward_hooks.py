"""Hooks on the forwards, gradients and state of a model whose tensors arrive while it trains."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ForwardOrder:
    """Calls `before` with the indices of a module's own tensors; records their first use.

    A pre-hook runs before every forward of every module that has parameters or buffers of
    `tensors`, also when activations are recomputed. A tensor that is used without a call of its
    module (such as the weights of `out_proj` in nn.MultiheadAttention) has no such hook: its owner
    waits for it elsewhere. In evaluation a forward may use other modules, so its first hook waits
    for all tensors.

    A compiled module waits once for all tensors inside of it, before its compiled code runs. The
    hooks of the modules inside are for other calls and leave nothing in its graph. Hooks break the
    graph of a module that is compiled after this object was created.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[Tensor],
        before: Callable[[Iterable[int]], None],
    ) -> None:
        self.order: dict[int, None] = {}  # an ordered set
        self._before, self._all, self._model = before, range(len(tensors)), model
        indices = {tensor: index for index, tensor in enumerate(tensors)}
        self._handles: list[RemovableHandle | CompiledCall] = []
        calls: dict[nn.Module, list[CompiledCall]] = {}  # of the compiled modules around a module
        for module in model.modules():
            inside = [indices[t] for t in (*module.parameters(), *module.buffers()) if t in indices]
            if not inside:
                continue
            if _is_compiled(module) and module not in calls:  # an outermost one
                wait = self._wait(inside)
                call = CompiledCall(module, before=wait)
                self._handles.append(call)
                for inner in module.modules():
                    calls.setdefault(inner, []).append(call)
            else:
                held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                wait = self._wait([indices[tensor] for tensor in held if tensor in indices])
            hook = UncompiledHook(wait, calls[module]) if module in calls else wait
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # A closure, not a bound method: a deep copy of the model shares it.
    def _wait(self, own: list[int]) -> Callable[..., None]:
        @torch.compiler.disable  # it must run at every forward, not once at tracing
        def wait(*_: Any) -> None:
            self.order.update(dict.fromkeys(own))
            self._before(own if self._model.training else self._all)

        return wait


def _is_compiled(module: nn.Module) -> bool:
    """Return whether it is the result of torch.compile(), or its compile() was called."""
    is_wrapper = isinstance(module, torch._dynamo.OptimizedModule)
    return is_wrapper or module._compiled_call_impl is not None


class CompiledCall:
    """Runs functions before and after the compiled code of a module, until `remove`.

    Hooks cannot: those of a module that was compiled by its compile() are a part of what is
    compiled. So this object takes the place of the compiled code. Several may do so, each in the
    place of the one before.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_running = False
        self._module, self._before, self._after = module, before, after
        is_wrapper = module._compiled_call_impl is None  # of torch.compile()
        self._attribute = "forward" if is_wrapper else "_compiled_call_impl"
        self.__wrapped__ = getattr(module, self._attribute)  # inspect.signature() follows it
        setattr(module, self._attribute, self)

    @torch.compiler.disable  # otherwise it is traced as a part of a model that is compiled later
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        was_running, self.is_running = self.is_running, True
        try:
            result = self.__wrapped__(*args, **kwargs)
        finally:
            self.is_running = was_running
        self._after()
        return result

    def remove(self) -> None:
        """Give the compiled code its place back, unless another compile() has taken it."""
        call = getattr(self._module, self._attribute)
        if call is self:
            setattr(self._module, self._attribute, self.__wrapped__)
        while isinstance(call, CompiledCall):
            if call.__wrapped__ is self:
                call.__wrapped__ = self.__wrapped__
            call = call.__wrapped__


class UncompiledHook:
    """Calls a function as a hook of a module, but never in the code that runs in `calls`.

    Other code that is compiled breaks its graph there. Copies of a module get hooks without effect.
    """

    def __init__(self, function: Callable[[], None], calls: Sequence[CompiledCall] = ()) -> None:
        self._function, self._calls = function, calls
        self._call_uncompiled = torch.compiler.disable(function)

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():  # the other takes microseconds
            self._function()
        # A guard: dynamo compiles again for a call that does not pass through `calls`.
        elif not any(call.is_running for call in self._calls):
            self._call_uncompiled()

    def __reduce__(self) -> Any:
        return _hook_of_copy, ()


def _hook_of_copy() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any) -> None:
    pass


def gradient_hooks(
    on_gradient: Mapping[nn.Parameter, Callable[[Tensor], None]],
) -> list[RemovableHandle]:
    """Register hooks that run when a gradient is complete; also on frozen parameters."""
    handles = []
    for parameter, hook in on_gradient.items():
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))
        parameter.requires_grad_(is_trained)
    return handles


def state_hooks(
    model: nn.Module, *, before: Callable[[], None], after_load: Callable[[], None] = lambda: None
) -> list[RemovableHandle]:
    """Call `before` each save or load of any module's state, `after_load` after the model's."""
    handles = [model.register_load_state_dict_post_hook(lambda *_: after_load())]
    for module in model.modules():
        handles.append(module.register_state_dict_pre_hook(lambda *_: before()))
        handles.append(module.register_load_state_dict_pre_hook(lambda *_: before()))
    return handles
