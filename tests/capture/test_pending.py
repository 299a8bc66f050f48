"""Gradients that wait between two batches: which of them keep a batch's end from being a restore point."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memckpt.capture.beside import presence
from memckpt.capture.beside.pending import PendingGradients
from memckpt.capture.beside.presence import DroppedGradients, describe_gradients, restore_gradients
from memckpt.capture.live_state import LiveState
from memckpt.state import codec
from memckpt.state.tensors import version
from tests.support.trainings import engine_steps
from tests.support.trainings.engine_child import config, kill_self
from tests.support.trainings.engine_harness import Ended, Lab
from tests.support.trainings.engine_training import Case


def committed(attempts: Sequence[Ended]) -> dict[int, bool]:
    """Whether each step was a restore point."""
    return {each["step"]: each["done"] for attempt in attempts for each in attempt.of("commit")}


def check_every(period: int, attempts: Sequence[Ended]) -> None:
    """Every so many steps there was a restore point, and nowhere else."""
    assert all(done == (step % period == 0) for step, done in committed(attempts).items())


@pytest.mark.promise(
    "exact with optimizers that accumulate at different intervals, deferred reductions, zero gradients, discarded "
    "gradients"
)
@pytest.mark.parametrize("redo", ["lazy", "eager", "snapshot"])
def test_gradients_wait_for_the_optimizer_that_owns_them(lab: Lab, redo: str) -> None:
    """Another one's step is none of theirs."""
    kills = [("after commit", 6), ("backward", 12), ("after commit", 15)]
    attempts = lab.survives(engine_steps.TWO_PACES, config(redo), kills, expected=[4, 8, 12])
    check_every(4, attempts)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_wait_whose_reduction_is_put_off(lab: Lab, kind: str) -> None:
    attempts = lab.survives(
        engine_steps.unsynchronized(kind), config("lazy"), [("after commit", 5), ("after commit", 10)], expected=[3, 9]
    )
    check_every(3, attempts)


@pytest.mark.promise(
    "which parameters have a gradient between two steps, and its values where up to 64 KiB of gradients are "
    "there, or where they are neither dropped nor zeroed before the next backward"
)
@pytest.mark.parametrize("redo", ["lazy", "snapshot"])
@pytest.mark.parametrize(
    "case", [engine_steps.ZEROED_IN_PLACE, engine_steps.SPARSE_ZEROED_IN_PLACE], ids=lambda case: case.name
)
def test_gradients_of_zeros_are_zeros_after_a_resume(lab: Lab, case: Case, redo: str) -> None:
    # Before the layer was used for the first time, and behind its use.
    lab.survives(case, config(redo), [("after commit", 2), ("after commit", 5), ("forward", 11)])


@pytest.mark.promise(
    "larger gradients of the last step that are used after a resume, before they are dropped or zeroed: no record "
    "holds their values once a step has used them"
)
@pytest.mark.parametrize("redo", ["lazy", "eager", "snapshot"])
def test_gradients_that_are_read_before_they_are_zeroed(lab: Lab, redo: str) -> None:
    """At first they are carried, whatever becomes of them. Later that is said at the read."""
    lab.survives(engine_steps.READ_GRADIENTS, config(redo), [("after commit", 1)])
    lab.stop()
    settings = config(redo, resume_check="off")
    lab.train(engine_steps.READ_GRADIENTS, settings, actions={("after commit", 8): kill_self})
    resumed = lab.train(engine_steps.READ_GRADIENTS, settings)
    assert resumed.restored_step == 8
    assert "training does not go on exactly: gradients of the resumed step were read" in resumed.log


@pytest.mark.parametrize("killed", [3, 4, 9])
def test_gradients_of_the_optimizer_whose_turn_it_is_not(lab: Lab, killed: int) -> None:
    """They are dropped when it is its turn again. Until then each backward adds to them, and the norm has them."""
    lab.survives(engine_steps.JOINT_TURNS, config("lazy", resume_check="off"), [("after commit", killed)])


@pytest.mark.parametrize("check", ["auto", "off"])
@pytest.mark.parametrize("killed", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "case",
    [
        engine_steps.LARGE,
        engine_steps.ZEROED_BEFORE,
        engine_steps.SOMETIMES_ZEROED,
        engine_steps.FADING,
        engine_steps.UNEVEN_TURNS,
    ],
    ids=lambda case: case.name,
)
def test_large_gradients_raise_no_alarm_where_zeros_are_right(lab: Lab, case: Case, killed: int, check: Any) -> None:
    """Set to None, zeroed before the commit, of turns: the first records, and later ones."""
    settings = config("lazy", resume_check=check)
    attempts = lab.survives(case, settings, [("after commit", killed), ("after commit", 14)])
    assert not any("not go on exactly" in each.log or "DIFFERENT" in each.log for each in attempts)


@pytest.mark.parametrize("check", ["auto", "off"])
@pytest.mark.parametrize("killed", [1, 2, 3])
@pytest.mark.parametrize(
    "case", [engine_steps.LARGE, engine_steps.ZEROED_BEFORE, engine_steps.UNEVEN_TURNS], ids=lambda case: case.name
)
def test_gradients_too_large_to_be_carried_raise_none_either(
    lab: Lab, case: Case, killed: int, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "UNKNOWN_BYTES", 0)
    kills = [("after commit", killed), ("after commit", killed + 1), ("after commit", 14)]
    attempts = lab.survives(case, config("lazy", resume_check=check), kills)
    assert not any("not go on exactly" in each.log or "DIFFERENT" in each.log for each in attempts)


@pytest.mark.promise(
    "larger gradients of the last step that are used after a resume, before they are dropped or zeroed: no record "
    "holds their values once a step has used them"
)
def test_gradients_that_only_the_norm_uses_are_carried_once_that_was_seen(lab: Lab) -> None:
    """No backward shows it. At first they are carried, whatever becomes of them."""
    settings = config("lazy", resume_check="off")

    def train(last: tuple[str, int] | None = None) -> Ended:
        lab.stop()
        lab.train(engine_steps.TURNS, settings, actions={("after commit", 8): kill_self})
        return lab.train(engine_steps.TURNS, settings, actions={} if last is None else {last: kill_self})

    lab.survives(engine_steps.TURNS, settings, [("after commit", 2)])
    resumed = train()
    assert resumed.restored_step == 8
    assert "training does not go on exactly: gradients of the resumed step were read" in resumed.log
    assert "gradients of 4 parameter(s), 0.0.bias among them, are used once more" in resumed.log
    killed = train(("after commit", 14))
    again = lab.train(engine_steps.TURNS, settings)
    assert again.restored_step == 14
    assert "training does not go on exactly: gradients" not in again.log
    assert killed.losses | again.losses == resumed.losses


NONE, ALL = [False, []], [True, []]


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def resumed() -> tuple[nn.Module, torch.optim.Optimizer, LiveState, list[str]]:
    """A model whose gradients of zeros stand for those that no record holds; and what is said of their use."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    live, told = LiveState(model, [optimizer], {}), list[str]()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    DroppedGradients(live, list(model.parameters()), told.append)
    return model, optimizer, live, told


def backward(model: nn.Module, live: LiveState) -> None:
    model(torch.ones(1, 3)).sum().backward()
    with torch.no_grad():  # as in a hook
        live.left.compare_gradients("family", list(model.parameters()), model.weight)


#: Ways in which training deals with gradients, and whether that drops them, reads their values or leaves them there.
WAYS: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], object], str]] = {
    "set to None": (lambda model, optimizer: optimizer.zero_grad(), "drops"),
    "zeroed": (lambda model, optimizer: optimizer.zero_grad(set_to_none=False), "drops"),
    "zeroed by the module": (lambda model, optimizer: model.zero_grad(set_to_none=False), "drops"),
    "zeroed by hand": (lambda model, optimizer: [one.data.zero_() for one in gradients_of(model)], "drops"),
    "detached and zeroed": (lambda model, optimizer: [one.detach_().zero_() for one in gradients_of(model)], "drops"),
    "looked at": (
        lambda model, optimizer: [(one.shape, one.dtype, one.numel()) for one in gradients_of(model)],
        "leaves",
    ),
    "replaced": (
        lambda model, optimizer: [setattr(p, "grad", torch.zeros_like(p.grad)) for p in model.parameters()],
        "drops",
    ),
    "product by 0": (lambda model, optimizer: [one.mul_(0) for one in gradients_of(model)], "drops"),
    "products by 0": (lambda model, optimizer: torch._foreach_mul_(gradients_of(model), 0.0), "drops"),
    "assigned": (lambda model, optimizer: [one.__setitem__(..., 0) for one in gradients_of(model)], "drops"),
    "copied to": (lambda model, optimizer: [one.copy_(torch.zeros_like(one)) for one in gradients_of(model)], "drops"),
    "zeroed as a view": (lambda model, optimizer: [one.data.view(-1).zero_() for one in gradients_of(model)], "drops"),
    "moved to where it is": (lambda model, optimizer: model.to("cpu").float(), "leaves"),
    "product": (lambda model, optimizer: [one.mul_(0.5) for one in gradients_of(model)], "reads"),
    "mean of a view": (lambda model, optimizer: gradients_of(model)[0].view(-1)[1:].mean(), "reads"),
    "copied within": (lambda model, optimizer: gradients_of(model)[0][0].copy_(gradients_of(model)[0][1]), "reads"),
    "norm": (lambda model, optimizer: nn.utils.get_total_norm(gradients_of(model)), "reads"),
    "mean of one": (lambda model, optimizer: gradients_of(model)[0].data.mean(), "reads"),
    "copied": (lambda model, optimizer: torch.zeros(2, 3).copy_(gradients_of(model)[0]), "reads"),
    "stepped with": (lambda model, optimizer: optimizer.step(), "reads"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_uses_gradients_that_no_record_holds(way: str) -> None:
    model, optimizer, live, told = resumed()
    use, found = WAYS[way]
    live.left.resume(ALL, set(), {})
    use(model, optimizer)
    assert len(told) == (found == "reads")
    backward(model, live)
    assert len(told) == (found != "drops"), "a backward adds to what is left"
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())
    assert torch.equal(model.weight.grad, torch.ones(2, 3))  # type: ignore[arg-type]  # there is one


def test_gradients_that_are_kept_beside_the_next_and_then_read() -> None:
    """As by Barzilai and Borwein's rates, and gradients of rates."""
    model, _, live, told = resumed()
    before = gradients_of(model)
    model.zero_grad()
    live.left.resume(ALL, set(), {})
    backward(model, live)
    assert not told
    for _ in range(2):
        sum((one * other).sum() for one, other in zip(before, gradients_of(model), strict=True))
    assert len(told) == 1


@pytest.mark.parametrize("use", ["none", "read", "added to"])
def test_gradients_of_a_skipped_step_stand_for_others_behind_a_resume(use: str) -> None:
    """They are assumed to be dropped: zeros of them that are read are no less wrong than those of a step."""
    (model, optimizer, live, told), failed = resumed(), list[str]()
    pending = PendingGradients([optimizer], failed.append)
    pending.resume({"thrown_away": [[[0], True]], "left": [[0]]})
    live.left.resume(ALL, set(), {})
    if use == "read":
        nn.utils.get_total_norm(gradients_of(model))
    if use != "added to":
        optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    with torch.no_grad():  # as in a hook
        pending.seen(model.weight)
    live.left.compare_gradients("family", list(model.parameters()), model.weight)
    assert (len(told), len(failed)) == (use != "none", use == "added to")


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("zeroed", [False, True])
def test_gradients_that_are_added_to_where_no_record_holds_them(known: bool, zeroed: bool) -> None:
    """Whether or not they were dropped or zeroed so far."""
    model, _, live, told = resumed()
    live.left.resume(ALL if known else NONE, set(), {})
    if zeroed:
        model.zero_grad(set_to_none=False)
    backward(model, live)
    assert len(told) == (not zeroed)
    assert live.left.kept == ({"weight", "bias"} if told else set())


def test_a_gradient_is_plain_again_once_it_is_overwritten_or_used() -> None:
    """Kernels look at the class, and copies and files at the attributes."""
    model, _, live, told = resumed()
    weight, bias = gradients_of(model)
    assert type(weight) is not Tensor
    copy.deepcopy(weight)
    assert (len(told), type(weight), vars(weight)) == (1, Tensor, {})
    assert type(bias) is not Tensor
    bias.zero_()
    assert (type(bias), vars(bias)) == (Tensor, {})
    assert live.left.dropped is None


def test_views_of_a_buffer_that_are_kept_stay_views_of_it() -> None:
    """A process that makes them before it resumes has them with the values that were restored."""
    model = nn.Linear(200, 200)
    flat = torch.zeros(200 * 201)
    live = LiveState(model, [torch.optim.SGD(model.parameters(), 0.1)], {})
    model.weight.grad, model.bias.grad = flat[: 200 * 200].view(200, 200), flat[200 * 200 :]
    flat.fill_(2.0)
    live.left.keep(list(model.parameters()))
    described = codec.decode(codec.encode(describe_gradients(live)))
    for name in ("weight", "bias"):
        restored = live.left.get(name)
        assert restored is not None
        restored.fill_(3.0)
    assert not restore_gradients(live, described)
    assert torch.equal(flat, torch.full_like(flat, 3.0))
    assert model.weight.grad is not None
    assert model.weight.grad.data_ptr() == flat.data_ptr()


def test_a_compiler_that_looks_at_gradients_does_not_read_them() -> None:
    """As it does where a forward is compiled before gradients are zeroed."""
    model, _, _, told = resumed()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mode.from_tensor(model.weight)
    torch.compile(model, backend="eager")(torch.ones(1, 3))
    assert not told


def test_two_parameters_may_share_a_gradient_and_change_its_layout() -> None:
    model, _, live, told = resumed()
    model.bias.grad = model.weight.grad[:, 0]  # type: ignore[index]  # there is one
    assert model.weight.grad is not None
    assert model.weight.grad.to_sparse().is_sparse
    backward(model, live)
    assert len(told) == 1
    assert all(type(one) is Tensor for one in gradients_of(model))


def test_gradients_without_elements_are_no_large_ones() -> None:
    model = nn.Sequential(nn.Linear(0, 200), nn.Linear(200, 200))
    live = LiveState(model, [torch.optim.SGD(model.parameters(), 0.1)], {})
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    described = codec.decode(codec.encode(describe_gradients(live)))
    assert "values" not in described
    assert not restore_gradients(live, described)
    live.left.compare_gradients("all", list(model.parameters()), model[1].bias)
    assert not live.left.kept


def test_gradients_are_read_by_name_too() -> None:
    model, _, _, told = resumed()
    torch.stack(tensors=[one.view(-1)[:2] for one in gradients_of(model)])
    assert len(told) == 1


def test_gradients_of_a_family_that_no_backward_reaches_stand_until_they_are_used() -> None:
    """Other optimizers' steps and commits change nothing about what they stand for."""
    model, _, live, told = resumed()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    live.left.compare_gradients("other", list(other.parameters()), other.weight)
    describe_gradients(live)
    live.left.compare_gradients("other", list(other.parameters()), other.weight)
    assert not told
    nn.utils.get_total_norm(gradients_of(model))
    assert (len(told), live.left.kept) == (1, {"weight", "bias"})
    assert all(type(one) is Tensor for one in gradients_of(model))


def test_a_gradient_that_a_hook_was_given_is_read_without_a_second_word() -> None:
    """Staging reads it behind the backward that has added to it."""
    model, _, live, told = resumed()
    given = model.weight.grad
    assert given is not None
    backward(model, live)
    assert given is model.weight.grad
    given.clone()
    assert len(told) == 1


@pytest.mark.parametrize("how", ["none", "zero", "by hand"])
def test_gradients_that_are_thrown_away_do_not_wait(lab: Lab, how: str) -> None:
    """Once that was seen, which is when the second batch begins; and after a resume it is known."""
    case = engine_steps.recycled(how)
    attempts = lab.survives(case, config("lazy"), [("after commit", 2), ("after commit", 7), ("backward", 12)])
    assert not committed(attempts[:1])[1]
    assert all(done for step, done in committed(attempts).items() if step > 1)
    assert "left over" not in "".join(each.log for each in attempts)


def test_gradients_that_are_used_after_all_are_told(lab: Lab) -> None:
    case = engine_steps.recycled("none", used_at=9)
    ended = lab.train(case, config("lazy"), last_step=14)
    assert "RMSprop that were left over at the end of a batch, and usually discarded, were used" in ended.log
    # From there on they wait, and here no step uses them before the batch's end.
    assert {step for step, done in committed([ended]).items() if not done} == {1, *range(9, 15)}
    lab.stop()


def test_gradients_that_are_used_after_a_resume_are_told(lab: Lab) -> None:
    """The resumed process has zeros in their place, and sees that nobody throws them away."""
    case = engine_steps.recycled("none", used_at=9)
    lab.train(case, config("lazy"), actions={("after commit", 8): kill_self})
    ended = lab.train(case, config("lazy"), last_step=10)
    assert ended.restored_step == 8
    assert "were used: a resume from that batch would not be exact" in ended.log
    lab.stop()


def test_gradients_left_on_a_parameter_that_was_replaced_are_not_kept() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    live, old = LiveState(model, [optimizer], {}), model.weight
    old.grad = torch.ones(2, 3)
    assert live.named_parameters()
    live.left.committed({id(old): version(old.grad)})
    model.weight = nn.Parameter(old.detach() * 0.5)
    optimizer.param_groups[0]["params"] = [model.weight, model.bias]
    model(torch.ones(1, 3)).sum().backward()
    live.left.compare_gradients("family", [old, model.bias], model.bias)
    assert live.left.kept == set()


def test_a_sparse_gradient_that_is_kept_comes_back_entry_by_entry() -> None:
    """The next backward's sum is taken in the order of its entries."""

    def live() -> LiveState:
        model = nn.Embedding(6, 2, sparse=True)
        return LiveState(model, [torch.optim.SGD(model.parameters(), 0.1)], {})

    ours, theirs = live(), live()
    for rows in ([1, 3, 1], [3, 3]):
        ours.model(torch.tensor(rows)).square().sum().backward()
    described = codec.decode(codec.encode(describe_gradients(ours)))
    assert restore_gradients(theirs, described) == []
    kept, found = (next(one.model.parameters()).grad for one in (ours, theirs))
    assert kept is not None
    assert found is not None
    assert kept._nnz() == found._nnz() == 4
    assert torch.equal(kept._indices(), found._indices())
    assert torch.equal(kept._values(), found._values())
    assert found.is_coalesced() == kept.is_coalesced()


def test_what_becomes_of_a_gradient_is_known_once_a_backward_has_met_it_large() -> None:
    """Few gradients are carried unseen: with more of them, these are carried until they were seen."""
    model = nn.Sequential(nn.Linear(100, 150, bias=False), nn.Linear(150, 60, bias=False))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)  # nobody drops the gradient of the first
    live = LiveState(model, [optimizer], {})

    def step(drops: bool) -> dict[str, Any]:
        optimizer.zero_grad()
        model(torch.ones(1, 100)).sum().backward()
        with torch.no_grad():  # as in a hook
            live.left.compare_gradients("family", [model[1].weight], model[1].weight)
        optimizer.step()
        if drops:
            model[1].weight.grad = None
        return describe_gradients(live)

    few, unknown, known = step(True), step(False), step(False)
    assert [("values" in each, each["known"]) for each in (few, unknown, known)] == [
        (True, NONE),
        (True, NONE),
        (False, ALL),
    ]
    assert live.left.kept == {"0.weight"}
