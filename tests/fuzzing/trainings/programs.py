"""Programs: trainings composed of ingredients, drawn by Hypothesis, and made simpler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from tests.fuzzing.trainings.ingredients import Data, Frame, Model, Opt, Piece, Style
from tests.fuzzing.trainings.models import MODELS
from tests.fuzzing.trainings.optimizers import OPTIMIZERS, SHARES
from tests.fuzzing.trainings.pieces import PIECES, REPORTED
from tests.fuzzing.trainings.steps import DATA, FRAMES, STYLES

Kill = tuple[str, int]

#: Each as often as it is drawn.
LOOPS = ("plain",) * 12 + ("lightning", "lightning", "manual", "accelerate", "accelerate", "trainer")
_OVER = "for x, y in loader:"
#: A Trainer makes its loader by itself, from the dataset.
_OF_A_TRAINER = ("shuffled", "transform with a generator", "pipeline of transforms")

#: What torch does not take together: by optimizer, pieces and models.
_APART: dict[str, set[str]] = {
    # Some gradients come later than others.
    "sgd fused": {
        *("sometimes a branch", "gradient taken away", "unfrozen later", "frozen in turns", "only at times"),
        *("group added", "layer wider", "parameter replaced with its group", "second optimizer unknown"),
    },
    "adam of a tensor": {"foreach switched on"},
    "sometimes a branch": {"layer wider"},
    "tried again": {"frozen in turns"},
    "scaled": {"unfrozen later"},  # a scaler wants gradients of each optimizer
    "without backward": {"empty and unused"},  # Adafactor divides by the size of each gradient
    "lookahead around another": {"layer wider", "groups in another order"},  # it has copies by position
    "average registered": {"layer wider"},
    "in backward": {"another loss first"},
    "eigenbasis": {"default dtype"},
}


@dataclass(frozen=True)
class Settings:
    """How memckpt is told to protect the training; None: its default."""

    redo: str = "lazy"
    period: int | None = None
    slots: int | None = None
    every: int = 1
    tap: str = "auto"
    check: str | None = None
    storage: bool = False

    def __str__(self) -> str:
        named = [f'redo="{self.redo}"']
        named += [f"anchor_period_steps={self.period}"] if self.period else []
        named += [f"slots={self.slots}"] if self.slots else []
        named += [f"snapshot_every_steps={self.every}"] if self.redo == "snapshot" else []
        named += [f'tap="{self.tap}"'] if self.tap != "auto" else []
        named += [f'resume_check="{self.check}"'] if self.check else []
        named += ["storage=None"] if not self.storage else ["storage=memckpt.StorageConfig(every_steps=3)"]
        return f"memckpt.MemckptConfig({', '.join(named)}, agent=memckpt.AgentConfig(linger_seconds=60))"


@dataclass(frozen=True)
class Program:
    """A training, by the names of its ingredients."""

    model: str
    optimizers: tuple[str, ...]
    share: str
    style: str
    data: str
    pieces: tuple[str, ...]
    settings: Settings
    kills: tuple[Kill, Kill]  # (point, step) at which the first and the second attempt die
    loop: str = "plain"  # whose loop it is: a "plain" one, or a framework's
    frame: str = "plainly"  # what is special about it in that framework
    node: bool = False  # whether agent and first attempt die together; storage serves
    reseeded: bool = True  # whether each attempt begins with other random numbers

    def ingredients(self) -> Iterator[Model | Opt | Style | Data | Piece | Frame]:
        yield MODELS[self.model]
        yield from (OPTIMIZERS[each] for each in self.optimizers)
        yield STYLES[self.style]
        yield DATA[self.data]
        yield from (PIECES[each] for each in self.pieces)
        if self.loop != "plain":
            yield FRAMES[self.loop][self.frame]

    def may(self, what: str) -> str:
        """A pattern of what may be said, or refused; "" if the training has to be exact."""
        return "|".join(found for each in self.ingredients() if (found := getattr(each, what, "")))

    def __str__(self) -> str:
        kills = ", ".join(f"{point} {step}" for point, step in self.kills)
        opts = " + ".join(self.optimizers)
        loop = [] if self.loop == "plain" else [f"{self.loop} ({self.frame})"]
        parts = (self.model, f"{opts} ({self.share})", self.style, self.data, *self.pieces, *loop)
        return f"{'; '.join(parts)}; {self.settings.redo}; {kills}"


# Drawing


def fits(program: Program) -> bool:
    """Whether the ingredients go together."""
    model, share, style = MODELS[program.model], SHARES[program.share], STYLES[program.style]
    opts = [OPTIMIZERS[each] for each in program.optimizers]
    pieces = [PIECES[each] for each in program.pieces]
    frame = Frame() if program.loop == "plain" else FRAMES[program.loop][program.frame]
    words = [word for each in (MODELS[program.model], style, frame, *pieces) for word in each.clash]
    names = {program.model, program.style, *program.optimizers, *program.pieces}
    traits = model.traits
    data_has_epochs = bool(DATA[program.data].loop)
    return (
        len(opts) == len(share)
        and all(each.wants <= traits for each in (style, *opts, *pieces))
        and len(words) == len(set(words))
        and all(not each.styles or program.style in each.styles for each in opts)
        and not (any(each.alone for each in opts) and ("groups" in words or program.share != "one"))
        and not ("groups" in words and program.share == "named")
        and ("weight_decay" not in str(share) or all(each.decays for each in opts))
        and not (program.style == "in backward" and (program.share != "one" or bool(opts[0].top)))
        and all(point in points(program.loop, program.style, program.frame) for point, _ in program.kills)
        and not ("commit" in words and data_has_epochs)
        and not ("data" in words and "loader" not in str(DATA[program.data]))
        and not any(_APART.get(each, set()) & names for each in names)
        and (program.loop == "plain" or _fits_framework(program))
    )


def _fits_framework(program: Program) -> bool:
    data, pieces = DATA[program.data], [PIECES[each] for each in program.pieces]
    return (
        all(each.framework for each in pieces)
        and data.loop == _OVER
        and not program.data.startswith("stream")
        and (program.loop != "trainer" or program.data in _OF_A_TRAINER)
        and not program.node
        and (program.style == "plain" if program.loop in ("lightning", "trainer") else STYLES[program.style].framework)
        and (len(program.optimizers) == 1 or program.loop in ("manual", "accelerate"))
    )


def points(loop: str, style: str, frame: str) -> tuple[str, ...]:
    """Where a program may be killed."""
    if loop == "lightning":
        return ("backward", "committed") if FRAMES[loop][frame].accumulates else ("backward", "between", "committed")
    if loop == "trainer":
        return ("between", "stepped", "committed")
    return (*STYLES[style].points, "committed")


@st.composite
def programs(draw: st.DrawFn, loops: Collection[str] = LOOPS) -> Program:
    """Any program; one in five draws two of the ingredients that were reported."""

    def one_of(names: Iterable[str]) -> str:
        return draw(st.sampled_from([*names]))

    loop = one_of(loops)
    plain = loop == "plain"
    pieces = [name for name in PIECES if plain or PIECES[name].framework]
    if draw(st.integers(0, 4)) == 4:
        reported = [name for name in REPORTED if name in pieces]
        chosen = draw(st.lists(st.sampled_from(reported), min_size=2, max_size=2, unique=True))
    else:
        chosen = draw(st.lists(st.sampled_from(pieces), max_size=4, unique=True))
    single = loop in ("lightning", "trainer")
    share = one_of(name for name in SHARES if len(SHARES[name]) == 1 or not single)
    styles = [name for name in STYLES if plain or (STYLES[name].framework and not single)]
    style = "plain" if single else one_of(["plain", *styles])
    frame = "plainly" if plain else one_of(FRAMES[loop])
    how = draw(_settings())
    program = Program(
        model=one_of(MODELS),
        optimizers=tuple(one_of(OPTIMIZERS) for _ in SHARES[share]),
        share=share,
        style=style,
        data=one_of(
            _OF_A_TRAINER if loop == "trainer" else (name for name in DATA if plain or DATA[name].loop == _OVER)
        ),
        pieces=tuple(sorted(chosen)),
        settings=how,
        kills=draw(_kills(points(loop, style, frame))),
        loop=loop,
        frame=frame,
        node=plain and how.storage and draw(st.booleans()),
        reseeded=draw(st.booleans()),
    )
    assume(fits(program))
    return program


def drawn(number: int, loops: Collection[str] = LOOPS) -> Program:
    """The program of a seed: the same in every process, independent of those of other seeds."""
    found: list[Program] = []

    # Hypothesis tries the simplest program first, whatever the seed.
    @seed(number)
    @settings(
        max_examples=2, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(programs(loops))
    def draw(program: Program) -> None:
        found.append(program)

    draw()
    return found[-1]


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one ingredient less, or a plainer one in its place; a minimum of a failure has none that fails.

    Hypothesis would need hundreds of runs for what takes dozens here, where each part of a program is known.
    """
    for piece in program.pieces:
        yield replace(program, pieces=tuple(each for each in program.pieces if each != piece))
    yield replace(program, loop="plain", frame="plainly")
    yield replace(program, frame="plainly")
    yield replace(program, data="drawn")
    yield replace(program, data="shuffled")
    yield replace(program, style="plain")
    yield replace(program, model="mlp")
    for each in program.optimizers:
        yield replace(program, share="one", optimizers=(each,))
    for index in range(len(program.optimizers)):
        for plainer in ("sgd", "adam"):
            opts = list(program.optimizers)
            opts[index] = plainer
            yield replace(program, optimizers=tuple(opts))
    yield replace(program, settings=Settings())
    for name, value in vars(Settings()).items():
        yield replace(program, settings=replace(program.settings, **{name: value}))
    yield replace(program, node=False)
    yield replace(program, reseeded=True)
    for index, (_, step) in enumerate(program.kills):
        kills = list(program.kills)
        kills[index] = ("committed", step)
        yield replace(program, kills=(kills[0], kills[1]))


@st.composite
def _settings(draw: st.DrawFn) -> Settings:
    storage = draw(st.integers(0, 9)) == 9
    return Settings(
        redo=draw(st.sampled_from(["lazy", "lazy", "eager", "snapshot"])),
        period=draw(st.sampled_from([None, 1, 2, 4, 7])),
        slots=draw(st.sampled_from([None, None, 2, 5])),
        every=draw(st.sampled_from([1, 1, 3])),
        tap=draw(st.sampled_from(["auto", "auto", "auto", "step"])),
        check=draw(st.sampled_from([None, None, None, "replay", "off"])),
        storage=storage,
    )


@st.composite
def _kills(draw: st.DrawFn, points: tuple[str, ...]) -> tuple[Kill, Kill]:
    first = draw(st.integers(3, 10))
    second = draw(st.integers(first + 1, 14))
    place = st.sampled_from([*points, "committed"])
    return (draw(place), first), (draw(place), second)
