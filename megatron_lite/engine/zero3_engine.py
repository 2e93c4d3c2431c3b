"""Zero3Engine: ZeRO stage 3, which gathers parameters in the module's own forward.

It has to wrap the model, so here gradients reach DeepSpeed after every micro-batch. One stage only:
ZeRO-3's check of the order of modules spans the whole world, and pipeline stages differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.engine.adam_state import first_state, forget_powers, set_step, steps_done
from megatron_lite.engine.deepspeed_setup import (
    before_update,
    build_optimizer,
    initialize,
    load_scaler,
    scaler_state,
)
from megatron_lite.engine.interface import StepOutcome, Working
from megatron_lite.engine.param_groups import param_groups, unique
from megatron_lite.layers.context import has_partial_grad, placement_of
from megatron_lite.mpu.groups import DeepSpeedMpu, Group, ProcessGroups
from megatron_lite.mpu.mappings import all_reduce
from megatron_lite.pipeline.executor import Root


class Zero3Engine:
    """One rank's whole model (its tensor-parallel shard) under ZeRO-3; see interface.Engine."""

    def __init__(
        self,
        model: nn.Module,
        *,
        deepspeed_config: dict[str, Any],
        adam: Mapping[str, Any],
        weight_decay: float,
        groups: ProcessGroups,
    ) -> None:
        self._model = model
        self._data_rank = groups.gradient.rank
        # Any: DeepSpeed gives parameters attributes that torch doesn't know.
        self._parameters = cast(list[Any], unique(model.parameters()))
        for parameter in self._parameters:
            parameter.model_parallel = placement_of(parameter).counted
            if has_partial_grad(parameter):
                parameter.register_hook(_summing(groups.tensor))
        optimizer = build_optimizer(
            param_groups(self._parameters, weight_decay=weight_decay), deepspeed_config, adam
        )
        self._watches: list[RemovableHandle] = []
        self._culprit: str | None = None
        self._engine = initialize(model, optimizer, deepspeed_config, DeepSpeedMpu(groups))
        self._create_moments()
        self.on_gradients: Callable[[Iterator[Fragment]], None] | None = None
        before_update(self._engine.optimizer, self._show_gradients)

    def _create_moments(self) -> None:
        """Create Adam's states now, as the zeros they start from, so that they can be exported."""
        zero = self._engine.optimizer
        for partition in zero.fp32_partitioned_groups_flat:
            zero.optimizer.state[partition] |= first_state(zero.optimizer, partition)

    @property
    def loss_scale(self) -> float:
        """Factor on losses before the backward."""
        return float(self._engine.optimizer.loss_scale)

    def begin_step(self, num_microbatches: int, *, diagnose: bool = False) -> None:
        # DeepSpeed accumulates by itself and starts anew after its step.
        self._culprit = None
        for handle in self._watches:
            handle.remove()
        watched = self._parameters if diagnose else []
        self._watches = [p.register_hook(self._watch(p)) for p in watched]

    def _watch(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def look(grad: Tensor) -> None:
            if self._culprit is None and not torch.isfinite(grad).all():
                self._culprit = ", ".join(placement_of(parameter).names)

        return look

    def nonfinite_parameter(self) -> str | None:
        return self._culprit

    def forward(self, stage: int, batch: Any, hidden: Tensor | None) -> Tensor:
        output: Tensor = self._engine(batch, hidden)
        return output

    def backward(self, output: Root, gradient: Tensor) -> None:
        assert isinstance(output, Tensor), "the only stage's output is its loss"
        optimizer = self._engine.optimizer
        optimizer.clear_backward_seen_flag()
        # DeepSpeed multiplies the loss by the loss scale itself; the weight already has it.
        weighted = output * (gradient / optimizer.loss_scale)
        self._engine.backward(weighted, scale_wrt_gas=False)

    def backward_input(self, output: Root, gradient: Tensor) -> Any:
        raise NotImplementedError("ZeRO-3 has one stage, and nothing to split a backward for")

    def backward_weight(self, waiting: Any) -> None:
        raise NotImplementedError("ZeRO-3 has one stage, and nothing to split a backward for")

    def step(self, lr: float) -> StepOutcome:
        optimizer = self._engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        forget_powers(optimizer.optimizer)
        self._engine.step()
        return StepOutcome(
            applied=not optimizer.overflow,
            grad_norm=float(optimizer._global_grad_norm),
            loss_scale=self.loss_scale,
        )

    def give_up_step(self) -> StepOutcome:
        self._engine.optimizer.zero_grad()  # the next backward writes over what was summed up
        return StepOutcome(applied=False, grad_norm=None, loss_scale=self.loss_scale)

    def working(self) -> Iterator[Working]:
        return (Working(p, p.ds_tensor.data, self._data_rank) for p in self._parameters)

    def fragments(self) -> Iterator[Fragment]:
        zero = self._engine.optimizer
        for parameter, start, held in self._shares():
            keys = {"fp32": None, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
            states = {
                name: zero._get_fp32_opt_state_partition(
                    parameter, release_swap_buffers=True, optim_state_key=key
                )[0][:held].data
                for name, key in keys.items()
            }
            yield Fragment(placement_of(parameter), start, states)

    def _shares(self) -> Iterator[tuple[Any, int, int]]:
        """Parameters with the first element and the number of elements that this rank owns."""
        for parameter in self._parameters:
            share = parameter.ds_tensor.ds_numel
            start = self._data_rank * share
            held = min(share, parameter.ds_numel - start)
            if held > 0:
                yield parameter, start, held

    def _show_gradients(self) -> None:
        if self.on_gradients is not None:
            read = self._engine.optimizer.get_local_fp32_grad_for_param
            self.on_gradients(
                Fragment(placement_of(p), start, {"grad": read(p).view(-1)[:held]})
                for p, start, held in self._shares()
            )

    def refresh(self) -> None:
        """Copy the masters into the working partitions, which DeepSpeed's own setters don't."""
        zero = self._engine.optimizer
        for parameter in self._parameters:
            master, _ = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=True)
            parameter.ds_tensor.data.copy_(master.view_as(parameter.ds_tensor))
        # Small parameters stay gathered between steps, with what they held.
        zero._partition_all_parameters()

    def scalars(self) -> dict[str, Any]:
        zero = self._engine.optimizer
        return {"optimizer_step": steps_done(zero.optimizer), "loss_scaler": scaler_state(zero)}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        set_step(self._engine.optimizer.optimizer, scalars["optimizer_step"])
        load_scaler(self._engine.optimizer, scalars["loss_scaler"])

    def train(self, mode: bool) -> None:
        self._model.train(mode)

    def modules(self) -> Mapping[int, nn.Module]:
        return {0: self._model}

    def close(self) -> None:
        self._engine.destroy()


def _summing(group: Group) -> Callable[[Tensor], Tensor]:
    """A gradient hook that adds the summands of the tensor-parallel ranks."""

    def hook(grad: Tensor) -> Tensor:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), group)

    return hook
