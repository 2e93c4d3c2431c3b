"""ZeroEngine: DeepSpeed's ZeRO-1 and ZeRO-2 behind a hand-over of ready gradients once a step.

DeepSpeed never sees the model. It is given a holder whose parameters share the model's storage, and
one backward that returns finished gradients, so schedules, recomputation and accumulation are
ours and every update is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.engine.adam_state import first_state, forget_powers, set_step, steps_done
from megatron_lite.engine.deepspeed_setup import (
    before_update,
    build_optimizer,
    initialize,
    load_scaler,
    scaler_state,
)
from megatron_lite.engine.gradients import GradientAccumulator, first_nonfinite
from megatron_lite.engine.interface import StepOutcome, Working
from megatron_lite.engine.param_groups import param_groups, parameters_of
from megatron_lite.layers.context import placement_of
from megatron_lite.layers.deferred import Deferred, WeightGradients
from megatron_lite.mpu.groups import DeepSpeedMpu, ProcessGroups
from megatron_lite.pipeline.executor import Root


class Holder(nn.Module):
    """Parameters without a forward; each shares the storage of a model parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(p.detach()) for p in parameters)
        for held, parameter in zip(self.held, parameters, strict=True):
            # DeepSpeed counts a parameter in norms on model-parallel ranks above 0 by the first
            # mark, and on rank 0 unless the second one forbids it.
            held.model_parallel = placement_of(parameter).counted
            held.ds_pipe_replicated = not placement_of(parameter).counted


class _HandOver(Function):
    """A 0-dim zero whose backward returns gradients that are already there."""

    @staticmethod
    def forward(ctx: Any, ready: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.ready = ready
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.ready)
        # With a second reference left, autograd would clone every gradient.
        ctx.ready.clear()
        return (None, *gradients)


class ZeroEngine:
    """One rank's stages with ZeRO stage 1 or 2; see engine.interface.Engine.

    `shared` are the parameters of which the ranks of the embedding group hold copies;
    `weight_gradients` is what the stages' layers were given for backwards that are split.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        deepspeed_config: dict[str, Any],
        adam: Mapping[str, Any],
        weight_decay: float,
        groups: ProcessGroups,
        accumulate_in_fp32: bool,
        shared: Sequence[nn.Parameter] = (),
        weight_gradients: WeightGradients | None = None,
    ) -> None:
        self._weight_gradients = weight_gradients or WeightGradients()
        self._stages = dict(stages)
        self._parameters = parameters_of(self._stages)
        self._gradients = GradientAccumulator(
            self._parameters,
            fp32=accumulate_in_fp32,
            tensor_group=groups.tensor,
            shared=shared,
            shared_group=groups.embedding,
        )
        holder = Holder(self._parameters)
        optimizer = build_optimizer(
            param_groups(list(holder.held), weight_decay=weight_decay), deepspeed_config, adam
        )
        self._engine = initialize(holder, optimizer, deepspeed_config, DeepSpeedMpu(groups))
        self._held = list(holder.held)
        self._create_moments()
        self.on_gradients: Callable[[Iterator[Fragment]], None] | None = None
        before_update(self._engine.optimizer, self._show_gradients)
        self._diagnose = False
        self._culprit: str | None = None
        for held, parameter in zip(self._held, self._parameters, strict=True):
            parameter.data = held.data

    @property
    def loss_scale(self) -> float:
        """Factor on losses before the backward."""
        return float(self._engine.optimizer.loss_scale)

    def begin_step(self, num_microbatches: int, *, diagnose: bool = False) -> None:
        self._diagnose, self._culprit = diagnose, None
        self._gradients.begin(num_microbatches)

    def nonfinite_parameter(self) -> str | None:
        return self._culprit

    def forward(self, stage: int, batch: Any, hidden: Tensor | None) -> Tensor:
        output: Tensor = self._stages[stage](batch, hidden)
        return output

    def backward(self, output: Root, gradient: Tensor) -> None:
        torch.autograd.backward(output, gradient)

    def backward_input(self, output: Root, gradient: Tensor) -> Sequence[Deferred]:
        return self._weight_gradients.put_off(output, gradient)

    def backward_weight(self, waiting: Sequence[Deferred]) -> None:
        for deferred in waiting:
            self._gradients.add(deferred.weight, deferred.compute())

    def step(self, lr: float) -> StepOutcome:
        optimizer = self._engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.clear_backward_seen_flag()
        ready = self._gradients.ready()
        if self._diagnose:
            self._culprit = first_nonfinite(self._parameters, ready)
        handed = _HandOver.apply(ready, *self._held)
        del ready
        self._engine.backward(handed, scale_wrt_gas=False)
        forget_powers(optimizer.optimizer)
        self._engine.step()
        return StepOutcome(
            applied=not optimizer.overflow,
            grad_norm=float(optimizer._global_grad_norm),
            loss_scale=self.loss_scale,
        )

    def give_up_step(self) -> StepOutcome:
        ready = self._gradients.ready()
        if self._diagnose:
            self._culprit = first_nonfinite(self._parameters, ready)
        return StepOutcome(applied=False, grad_norm=None, loss_scale=self.loss_scale)

    def working(self) -> Iterator[Working]:
        return (Working(parameter, parameter.data, None) for parameter in self._parameters)

    def fragments(self) -> Iterator[Fragment]:
        for held, parameter in zip(self._held, self._parameters, strict=True):
            mapping = held._hp_mapping
            if mapping is None:
                continue
            address = mapping.lp_fragment_address
            states = {"fp32": mapping.hp_fragment, **mapping.optim_fragment}
            states = {k: states[k].data for k in ("fp32", "exp_avg", "exp_avg_sq")}
            yield Fragment(placement_of(parameter), address.start, states)

    def _show_gradients(self) -> None:
        if self.on_gradients is not None:
            self.on_gradients(self._averaged_gradients())

    def _averaged_gradients(self) -> Iterator[Fragment]:
        for held, parameter in zip(self._held, self._parameters, strict=True):
            if (mapping := held._hp_mapping) is None:
                continue
            grad = mapping.get_lp_grad_fragment(held._index_in_param_group).view(-1)
            address = mapping.lp_fragment_address
            assert grad.numel() == address.numel, "DeepSpeed's lists of gradients are misaligned"
            yield Fragment(placement_of(parameter), address.start, {"grad": grad})

    def _create_moments(self) -> None:
        """Create Adam's states now, as the zeros they start from.

        Left to the first update they would be created group by group, and DeepSpeed links fragments
        to them after the first group, so those of the second would stay without.
        """
        zero = self._engine.optimizer
        for partition in zero.single_partition_of_fp32_groups:
            zero.optimizer.state[partition] |= first_state(zero.optimizer, partition)
        zero._lazy_init_hp_params_optimizer_state()

    def refresh(self) -> None:
        self._engine.optimizer.update_lp_params()

    def scalars(self) -> dict[str, Any]:
        zero = self._engine.optimizer
        return {"optimizer_step": steps_done(zero.optimizer), "loss_scaler": scaler_state(zero)}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        set_step(self._engine.optimizer.optimizer, scalars["optimizer_step"])
        load_scaler(self._engine.optimizer, scalars["loss_scaler"])

    def train(self, mode: bool) -> None:
        for stage in self._stages.values():
            stage.train(mode)

    def modules(self) -> Mapping[int, nn.Module]:
        return self._stages

    def close(self) -> None:
        self._engine.destroy()
