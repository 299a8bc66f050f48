"""Redo of several groups of parameters at the same time: groups are independent, a group's records are not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from memckpt.state.layout import Layout
from memckpt.state.optimizers import without_global_hooks
from memckpt.state.redo import RedoTarget


class RedoThreads:
    """Threads that redo groups of parameters, a core each; in the calling thread where that is not safe.

    A step of a small tensor keeps one core busy, and records of a group find its state in that core's cache. A group is
    safe if its parameters may be cut into pieces (:attr:`~memckpt.state.spec.ParamSpec.whole`): their optimizers are
    torch's own, and their bits do not depend on the number of threads. An accelerator is parallel by itself.
    """

    def __init__(self, layout: Layout, threads: int | None = None) -> None:
        self._layout = layout
        self._threads = torch.get_num_threads() if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._hooks = without_global_hooks()

    @property
    def width(self) -> int:
        """Number of groups that are redone at the same time."""
        return self._threads if self._pool is not None else 1

    def __enter__(self) -> RedoThreads:
        self._hooks.__enter__()
        if self._threads > 1:
            # A thread for each core, and no threads of torch's own beside them.
            self._torch_threads = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(
                self._threads, "memckpt-redo", initializer=torch.set_num_threads, initargs=(1,)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=error is not None)
                torch.set_num_threads(self._torch_threads)  # also for threads that torch begins later
        finally:
            self._running.clear()
            self._hooks.__exit__(kind, error, traceback)

    def run(self, redo_targets: Sequence[RedoTarget], redo: Callable[[], None], after: Callable[[], None]) -> None:
        """Redo a group, possibly later and in another thread.

        Args:
            after: called behind that in the calling thread, at the latest by :meth:`wait`; groups in their order.

        Raises:
            Exception: what `redo` of this group or of an earlier one has raised.
        """
        if self._pool is None or not all(self._is_safe(one) for one in redo_targets):
            self.wait()
            redo()
            after()
            return
        self._running.append((self._pool.submit(_without_gradients, redo), after))
        if len(self._running) > 2 * self._threads:
            self._take_first()

    def wait(self) -> None:
        """Wait until all groups are redone."""
        while self._running:
            self._take_first()

    def _take_first(self) -> None:
        redone, after = self._running.popleft()
        redone.result()
        after()

    def _is_safe(self, redo_target: RedoTarget) -> bool:
        param = self._layout.spec.params[redo_target.param]
        return redo_target.parameter.device.type == "cpu" and not param.whole


def _without_gradients(redo: Callable[[], None]) -> None:
    with torch.no_grad():  # a thread's own setting
        redo()
