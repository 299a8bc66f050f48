"""A session that tells observers what happens to it, and is a session like any other beside that."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.config.arguments import ProtectionArguments
from memckpt.config.observers import Committed, Observer, Watched
from memckpt.session.resume.report import RestoreReport
from memckpt.session.session import Session
from memckpt.state import codec


class ObservedSession(Session):
    """Calls observers behind each restore and each commit. Made where MEMCKPT_OBSERVERS is set."""

    def __init__(
        self,
        observers: Sequence[Observer],
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
        self._observers = observers
        live, ranks = self._live, self._ranks
        place = (arguments.run_dir, ranks.node, ranks.rank, ranks.world_size, self.agent_pid)
        for each in observers:
            each.begin(Watched(live.model, live.optimizers, live.tensors, *place))

    def restore_tensors(self) -> RestoreReport | None:
        report = super().restore_tensors()
        if report is not None:
            for each in self._observers:
                each.see_restored(report.step, report.record, report.tier, report.seconds, report.repeated)
        return report

    def commit(
        self, step: int | None = None, gradients_pending: bool | None = None, *, epoch_over: bool = False
    ) -> bool:
        repeated = self._proof.repetition is not None
        committed = super().commit(step, gradients_pending, epoch_over=epoch_over)
        if committed:
            point = self._last
            assert point is not None
            told = Committed(
                point.step,
                point.record,
                lambda: self._rank_state.parts(codec.decode(point.rank_state)),
                caller=sys._getframe(1),
                stalled=self.stall.total,
                repeated=repeated,
                agent=self.agent_pid,
                check=(self.check.verdict, self.check.line),
            )
            for each in self._observers:
                each.see_committed(told)
        return committed

    def close(self, finished: bool = True) -> None:
        if not self._closed:
            for each in self._observers:
                each.close()
        super().close(finished)
