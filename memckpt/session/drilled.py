"""A session under ``memckpt drill``: it writes a line for each step, and is a session like any other beside that."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.config.arguments import ProtectionArguments
from memckpt.config.drill import DrillOrders
from memckpt.session.report import RestoreReport
from memckpt.session.session import Session
from memckpt.state import codec
from memckpt_tools.drill.fingerprint import Fingerprints
from memckpt_tools.drill.probe import Probe


class DrilledSession(Session):
    """Writes digests of the state behind each commit, and what is restored. Made where MEMCKPT_DRILL is set."""

    def __init__(
        self,
        orders: DrillOrders,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        arguments: ProtectionArguments,
        *,
        data_parallel: DistributedDataParallel | None,
        extra_modules: Mapping[str, nn.Module],
        replicated: Sequence[str] = (),
    ) -> None:
        super().__init__(
            model,
            optimizers,
            arguments,
            data_parallel=data_parallel,
            extra_modules=extra_modules,
            replicated=replicated,
        )
        ranks = self._ranks
        fingerprints = Fingerprints(self._live, self._copier)
        self._probe = Probe(orders, fingerprints, self._live.model, ranks.rank, ranks.world_size, ranks.node)
        self._probe.begin(self.agent_pid)

    def restore_tensors(self) -> RestoreReport | None:
        report = super().restore_tensors()
        if report is not None:
            self._probe.restored(report.step, report.record, report.tier, report.seconds, report.repeated)
        return report

    def commit(
        self, step: int | None = None, gradients_pending: bool | None = None, *, epoch_over: bool = False
    ) -> bool:
        repeated = self._proof.repetition is not None
        committed = super().commit(step, gradients_pending, epoch_over=epoch_over)
        if committed:
            point = self._last
            assert point is not None
            self._probe.taken(
                point.step,
                point.record,
                self._rank_state.parts(codec.decode(point.rank_state)),
                caller=sys._getframe(1),
                stalled=self.stall.total,
                repeated=repeated,
                agent=self.agent_pid,
                check=(self.check.verdict, self.check.line),
            )
        return committed

    def close(self, finished: bool = True) -> None:
        if not self._closed:
            self._probe.close()
        super().close(finished)
