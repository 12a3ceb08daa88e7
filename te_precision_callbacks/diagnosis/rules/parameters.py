"""Rules on weights after an optimizer's step (stale, lost or too small updates), on parameters that do not train, and
on parameters that differ between ranks. :class:`ParameterProblems` judges the measurements of parameters during a run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.diagnosis.facts import Facts, Row
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.rule import AboveLimit, Rule, RuleCheck, Sighting, Sightings
from te_precision_callbacks.diagnosis.rules.settings import remedy_of_small_gradients
from te_precision_callbacks.layers.folding import fold_for_sentence, form_of, numbers_of
from te_precision_callbacks.parameters.parameter import (
    FEW_CHANGED,
    SAMPLED_CLEARINGS,
    Gap,
    Parameter,
    ParameterProblem,
    Problem,
)
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.names import BELOW_EPS, STALE
from te_precision_callbacks.statistics.names import UNCHANGED as UNCHANGED_SHARE

if TYPE_CHECKING:
    from te_precision_callbacks.parameters.watch import ParameterWatch

ENDS_BY_A_GRADIENT: frozenset[ParameterProblem] = frozenset({"no_gradient", "checkpointed", "lost_gradient"})
"""Problems that a later gradient makes a note."""

_NEVER_REACHED = ("no_gradient", "checkpointed", "frozen_held")

WITHOUT_GRADIENT = 6
"""Optimizer steps after which a parameter without a gradient is reported."""

MOST_IDLE = 64
"""The same for a parameter whose module does not run while a similar parameter has a gradient: blocks may be skipped at
random, experts may get no tokens.
"""

LOST = 8
"""Consecutive steps without a gradient, although the module runs and earlier steps had one."""

IDLE = 60
"""Steps between the first and the last gradient of 0 of a parameter whose similar parameters have gradients."""

UNSTEPPED = 20
"""Consecutive debug iterations without a step of optimizers that stepped before."""

UNCHANGED = 3
SPAN = 6
"""Minimum of sampled steps that should have changed a weight, and of the steps that they span."""

NEARLY_ALL = 0.9
"""Smallest share of matrices that hardly change, or have gradients of 0, for a problem of the model."""

APART = 0.01
APART_CHECKS = 2
"""Share of sampled elements that differ from the master weight by more than rounding, and the consecutive checks that
must find it.
"""

LARGE = 32.0
"""The root mean square of a sample of a weight. Trained models have at most about 10, in T5's embeddings."""

UNCLIPPED = 3
"""Steps in which clipping left out a gradient."""

DECAYS = 0.02
"""Share of a weight that weight decay removes in a step: half of it in 34 steps."""

TIMES_ORDINARY = 8.0
REPLACED = 0.5
"""An overwritten weight differs from its last sample by so many times the ordinary change, and by this share of its
norm."""

LATE = 8
"""Steps after which a weight that is equal to an earlier sample again was restored."""


class ParameterProblems:
    """The problems of a run's parameters, each reported once.

    Attributes:
        checked: rules that had enough data.
        unmatched: see :attr:`~te_precision_callbacks.parameters.optimizers.ParameterList.unmatched`.
    """

    def __init__(self, watch: ParameterWatch) -> None:
        self.checked: set[str] = set()
        self.unmatched: list[str] = []
        self._watch = watch
        self._reported: set[tuple[str, str]] = set()

    def find(self, *, at_last: bool = False) -> list[Problem]:
        """Return the new problems."""
        watch = self._watch
        if watch.is_due:
            self.unmatched = watch.listed.unmatched
        parameters = watch.parameters
        without: list[tuple[Parameter, Gap]] = []
        trains = bool(watch.steps) or any(parameter.has_gradient for parameter in parameters)
        gaps = [(parameter, parameter.gap) for parameter in parameters if parameter.gap is not None]
        if gaps and trains:
            held = watch.listed.held
            without = [(parameter, gap) for parameter, gap in gaps if parameter in held or not held]
        idle = _idle(parameters)
        candidates = [
            *idle.values(),
            *self._arrived(),
            *self._decays(),
            *self._unclipped(),
            *_missing_gradients(parameters, [(parameter, gap) for parameter, gap in without if parameter not in idle]),
            *_of_weights(parameters),
            *self._of_optimizers(at_last=at_last),
            *_of_nearly_all(parameters),
            *self._kept_gradients(parameters),
            *self._unheld(),
        ]
        problems = [problem for problem in candidates if problem[:2] not in self._reported]
        self._reported.update(problem[:2] for problem in problems)
        if "frozen-weight" not in self.checked and any(
            row.changed > 0 or row.moved > 0 for parameter in parameters for row in parameter.rows
        ):
            self.checked.add("frozen-weight")
        if watch.schedules:
            self.checked |= {"learning-rate", "gradient-norm", "sibling"}
        reported = {name for what, name in self._reported if what in _NEVER_REACHED}
        never_reached = {parameter.name for parameter, _ in without if not parameter.has_gradient}
        if trains and not self.unmatched and never_reached <= reported:
            self.checked.add("missing-gradient")
        return problems

    def with_shares(self, nonfinite: Sequence[Problem]) -> list[Problem]:
        """Return the problems of gradients and weights that are not finite, with the share of all trained ones."""
        gradients = sum(parameter.at_step for parameter in self._watch.parameters)
        share = 100 * len({problem.name for problem in nonfinite}) / max(1, gradients)
        return [problem._replace(number=share) for problem in nonfinite]

    def _arrived(self) -> Iterator[Problem]:
        for parameter, gap in self._watch.ended_gaps:
            name = parameter.name
            ended = {(what, name) for what in ENDS_BY_A_GRADIENT} & self._reported
            if ended:
                self._reported -= {*ended, ("arrived", name)}
                yield Problem("arrived", name, gap.since, gap.steps)
        self._watch.ended_gaps.clear()

    def _unclipped(self) -> Iterator[Problem]:
        for parameter in self._watch.parameters:
            if parameter.unclipped >= UNCLIPPED:
                since = self._watch.ended + 1 - parameter.unclipped
                yield Problem("unclipped", parameter.name, since, parameter.unclipped)

    def _decays(self) -> Iterator[Problem]:
        for optimizer in self._watch.listed.stepped.values():
            for decaying in optimizer.groups:
                share = decaying.get("lr", 0.0) * decaying.get("weight_decay", 0.0)
                is_share = optimizer.decays or decaying.get("decoupled_weight_decay")
                if is_share and isinstance(share, float) and share >= DECAYS:
                    for parameter, _, group, _ in optimizer.held:
                        if group is decaying:
                            yield Problem("decays", parameter.name, self._watch.ended, 100 * share)

    def _of_optimizers(self, *, at_last: bool) -> Iterator[Problem]:
        watch = self._watch
        steps = watch.ended - watch.last_update
        is_over = at_last and steps >= SPAN and not watch.has_updated
        if watch.steps and (steps >= UNSTEPPED or is_over):
            yield Problem("unstepped", "", watch.last_update + watch.has_updated, steps)
        for schedule in watch.schedules.values():
            if schedule.rises_again and schedule.zero_at is not None:
                yield Problem("rises_again", "", schedule.zero_at, 100 * schedule.last / schedule.largest)

    def _kept_gradients(self, parameters: Iterable[Parameter]) -> Iterator[Problem]:
        """Find gradients that are not cleared."""
        trained = 0
        problems: list[Problem] = []
        for parameter in parameters:
            trained += parameter.has_gradient
            if len(parameter.cleared) == SAMPLED_CLEARINGS:
                self.checked.add("kept-gradient")
                if not any(parameter.cleared.values()):
                    problems.append(Problem("kept", parameter.name, min(parameter.cleared), SAMPLED_CLEARINGS))
        if len(problems) == trained > 1:
            yield Problem("all_kept", "", min(problem.since for problem in problems), SAMPLED_CLEARINGS)
        elif ("all_kept", "") not in self._reported:
            yield from problems

    def _unheld(self) -> Iterator[Problem]:
        """Find trained parameters that no optimizer of the process steps."""
        if self.unmatched or self._watch.steps < WITHOUT_GRADIENT:
            return
        unheld = self._watch.listed.unheld()
        for parameter in unheld:
            what: ParameterProblem = "converted" if parameter.is_converted else "not_held"
            yield Problem(what, parameter.name, parameter.held_until + 1, len(unheld))


def _is_left_out(parameter: Parameter) -> bool:
    gap = parameter.gap
    return gap is not None and not gap.called and gap.steps >= max(MOST_IDLE, 4 * parameter.longest_gap)


def _idle(parameters: Sequence[Parameter]) -> dict[Parameter, Problem]:
    """Find parameters without a gradient other than 0 for many steps while similar ones have others, as of experts
    without tokens. A block of a stack that never ran is not a problem.

    The number is the percentage of similar parameters.
    """
    since: dict[Parameter, int] = {}
    for parameter in parameters:
        run = parameter.zeros
        if run is not None and parameter.is_matrix and run.last - run.since >= IDLE:
            since[parameter] = run.since
        elif parameter.gap is not None and _is_left_out(parameter):
            since[parameter] = parameter.gap.since
    if not since:
        return {}
    similar = Counter(form_of(parameter.name) for parameter in parameters)
    without = Counter(
        form_of(parameter.name) for parameter in parameters if parameter.gap is not None or parameter.zeros is not None
    )
    idle: dict[Parameter, Problem] = {}
    for parameter, first in since.items():
        form = form_of(parameter.name)
        may_train = parameter.has_gradient or len(numbers_of(parameter.name)) > 1
        if may_train and parameter.is_trained and without[form] < similar[form]:
            idle[parameter] = Problem("idle", parameter.name, first, 100 * without[form] / similar[form])
    return idle


def _missing_gradients(parameters: Iterable[Parameter], without: Sequence[tuple[Parameter, Gap]]) -> Iterator[Problem]:
    forms = {form_of(parameter.name) for parameter in parameters if parameter.has_gradient and without}
    for parameter, gap in without:
        problem: ParameterProblem | None = None
        if parameter.has_gradient and parameter.is_trained:
            if gap.called >= max(LOST, 2 * parameter.longest_gap):
                problem = "lost_gradient"
            elif _is_left_out(parameter):
                problem = "left_out"
        else:
            may_idle = parameter.is_trained and form_of(parameter.name) in forms and gap.called < WITHOUT_GRADIENT - 1
            if gap.steps >= (MOST_IDLE if may_idle else WITHOUT_GRADIENT):
                problem = "checkpointed" if gap.checkpointed else "no_gradient"
                problem = problem if parameter.is_trained else "frozen_held"
        if problem is not None:
            yield Problem(problem, parameter.name, gap.since, gap.steps)


def _of_weights(parameters: Iterable[Parameter]) -> Iterator[Problem]:
    """Find weights that are too large from the start, that do not change, that differ from their master weights, or
    that other code has written."""
    for parameter in parameters:
        if parameter.first_size >= LARGE:
            yield Problem("large", parameter.name, parameter.samples[0].iteration, parameter.first_size)
        if parameter.master_rows or parameter.rows:
            yield from _unchanged(parameter)
        if parameter.writes:
            yield from islice(_overwritten(parameter), 1)


def _unchanged(parameter: Parameter) -> Iterator[Problem]:
    """Find a weight that does not follow its master weight, or that does not change."""
    if parameter.master_rows:
        measured = [row for row in parameter.master_rows if not math.isnan(row.apart)][-APART_CHECKS:]
        apart = [row for row in measured if row.apart >= APART]
        if len(apart) >= APART_CHECKS:
            yield Problem("apart", parameter.name, apart[0].iteration, 100 * max(row.apart for row in apart))
        if apart:
            return
    moves: list[int] = []
    for row in parameter.rows:  # no call each
        if row.changed > 0:
            return
        if row.moved > 0:
            moves += (row.iteration,)
    if len(moves) >= UNCHANGED and moves[-1] - moves[0] >= SPAN:
        yield Problem("unchanged", parameter.name, moves[0], len(moves))


def _overwritten(parameter: Parameter) -> Iterator[Problem]:
    """Find writes of a weight; the number of a problem is the iteration of the sample that the weight differs from."""
    for row in parameter.writes:
        distances = row.distances
        if not distances:
            continue
        *_, size_of_last, size = distances[0]
        *to_earlier, to_last, _ = distances[-1][1:]
        last = row.sampled[-1]
        if size == 0 < size_of_last:
            yield Problem("emptied", parameter.name, row.iteration, last)
        for earlier, distance in zip(row.sampled[:-1], to_earlier, strict=False):
            if row.iteration - earlier >= LATE and distance == 0 < to_last:
                yield Problem("restored", parameter.name, row.iteration, earlier)
        if len(row.sampled) > 1:
            ordinary = distances[-2][-3] * max(1.0, (row.iteration - last) / (last - row.sampled[-2]))
            if to_last > TIMES_ORDINARY * ordinary > 0 and to_last > REPLACED * max(size, size_of_last) and size > 0:
                yield Problem("replaced", parameter.name, row.iteration, last)


def _of_nearly_all(parameters: Iterable[Parameter]) -> Iterator[Problem]:
    """Find problems of nearly all matrices: gradients of 0 at the optimizer's step, and float32 weights that hardly
    change. A bias of 0 is excluded, since any update changes it.
    """
    trained = [parameter for parameter in parameters if parameter.has_gradient and parameter.is_matrix]
    runs = [(parameter, parameter.zeros) for parameter in trained if parameter.zeros is not None]
    zeroed = [(parameter, run) for parameter, run in runs if run.last - run.since >= SPAN]
    if len(zeroed) >= NEARLY_ALL * len(trained):
        for parameter, run in zeroed:
            yield Problem("zeroed", parameter.name, run.since, run.steps)
    sampled = [parameter for parameter in trained if parameter.rows]
    still = [(parameter, span) for parameter in sampled if len(span := _still_steps(parameter)) >= SPAN]
    if len(still) >= NEARLY_ALL * len(sampled):
        for parameter, span in still:
            yield Problem("still", parameter.name, span.start, len(span))


def _still_steps(parameter: Parameter) -> range:
    """Return the steps in which a float32 weight hardly changes at a learning rate above 0, although it does not have
    to stay the same."""
    rows = parameter.rows
    is_float32 = str(parameter.samples[0].values.dtype) == "torch.float32"
    if rows[-1].iteration - rows[0].iteration < SPAN or not is_float32:
        return range(0)
    since = rows[0].iteration
    until = since
    has_changed = has_moved = False
    for row in rows:  # no call each
        if row.changed > FEW_CHANGED:
            return range(0)
        has_changed |= row.changed > 0
        has_moved |= row.moved > 0
        if row.changed <= FEW_CHANGED:  # it was compared
            until = row.iteration
            since = until if row.rate == 0 else since
    return range(since, until) if has_changed or not has_moved else range(0)


_MOST_NAMES = 8


class _Kind(NamedTuple):
    """A kind of :class:`~te_precision_callbacks.parameters.parameter.Problem`.

    ``seen`` is the description, with places for ``names``, ``all_names``, ``number`` and ``since``; remedy and
    severity are by default the rule's.
    """

    seen: str
    remedy: str = ""
    severity: Severity | None = None


_WRITTEN = "{names}: other code than the optimizer"

_KINDS: Mapping[str, Mapping[ParameterProblem, _Kind]] = {
    "missing-gradient": {
        "no_gradient": _Kind("{names} received no gradient in {number:.0f} optimizer steps"),
        "checkpointed": _Kind(
            "{names} received no gradient in {number:.0f} optimizer steps, because a reentrant checkpoint ran the"
            " forward and none of its inputs needs a gradient",
            """
                Checkpoint with use_reentrant=False, or let the input of the checkpoints need a
                gradient: model.enable_input_require_grads() in transformers and PEFT, or
                x.requires_grad_() on the output of a frozen embedding
            """,
        ),
        "lost_gradient": _Kind(
            "{names} had gradients at the optimizer's step, but none since step {since}, although the module runs",
        ),
        "arrived": _Kind(
            "{all_names} received no gradient in {number:.0f} optimizer steps from step {since} on, and later did"
            " again",
            severity="note",
        ),
        "left_out": _Kind(
            "{names}: not used in any forward in {number:.0f} steps, since step {since}",
            "If the module should train, check why forward() no longer calls it",
            "note",
        ),
        "idle": _Kind(
            "{names}: no gradient other than 0 was seen since step {since}, for example because experts get no tokens;"
            " {number:.0f} % of similar weights",
            "Check the load of the experts, and whether the router's auxiliary loss is part of the loss",
            "note",
        ),
        "not_held": _Kind(
            "{names} received gradients, but no optimizer updates them",
            """
                Pass all trainable parameters to the optimizer, including parameters that were added or
                replaced after the optimizer was created
            """,
        ),
        "converted": _Kind(
            "{names} received gradients, but no optimizer updates them: Accelerate's FP8 conversion has replaced them",
            """
                The conversion unfreezes frozen parameters and unties tied ones. After
                accelerator.prepare(), freeze again what should not train (requires_grad_(False)), and
                tie again (such as model.tie_weights()). Or first call
                accelerate.utils.convert_model(model), then freeze and tie, then create the optimizer
            """,
        ),
        "frozen_held": _Kind(
            "an optimizer contains {names}, with requires_grad=False",
            "If the parameter should train, set requires_grad=True; otherwise remove it from the optimizer",
            "note",
        ),
    },
    "frozen-weight": {
        "unchanged": _Kind(
            "{names}: no bit changed in {number:.0f} sampled optimizer steps that should have changed it"
        ),
        "unstepped": _Kind(
            "no optimizer of the model has stepped with a learning rate above 0 in {number:.0f} steps, since step"
            " {since}",
            """
                Check whether the loop still calls optimizer.step(), and whether the learning-rate
                scheduler ends too early, for example by counting micro-batches. A GradScaler skips
                steps with inf or nan
            """,
            "warning",
        ),
        "zeroed": _Kind(
            "all gradient elements of {names}, and of nearly all other weights, were 0 at {number:.0f} optimizer steps",
            """
                Look for zero_grad() between backward() and the optimizer step, and for a loss or
                gradient multiplied by 0
            """,
            "warning",
        ),
        "still": _Kind(
            "almost no elements of {names}, and of nearly all other weights, changed in {number:.0f} steps",
            """
                Check the learning rate and the loss scale. Look for code that removes gradients before
                the optimizer step or restores old weights
            """,
            "warning",
        ),
        "apart": _Kind(
            "{number:.3g} % of the sampled elements of {names} differ from the optimizer's master weights by more than"
            " rounding",
            """
                Copy the master weights into the weights after each optimizer step, before the next
                forward. After loading a checkpoint, copy the weights into the master weights
            """,
        ),
    },
    "learning-rate": {
        "rises_again": _Kind(
            "the learning rate fell to 0 in step {since} and has risen to {number:.2g} % of its largest value again"
        ),
        "decays": _Kind(
            "weight decay removes {number:.3g} % of {names} in each step",
            """
                Lower weight_decay= of the optimizer's parameter group. Times the learning rate, it is
                the share of the weights that a step removes
            """,
        ),
    },
    "gradient-norm": {
        "unclipped": _Kind(
            "{all_names}: not among the parameters that were clipped in {number:.0f} optimizer steps, so the norm is"
            " that of the others"
        ),
        "norms_differ": _Kind(
            "ranks have clipped by gradient norms that are {number:.3g} times apart, each by that of its own gradients",
            """
                Clip by one norm on all ranks, after gradients are averaged: of shards, experts and stages, add up the
                squares over the ranks. FullyShardedDataParallel has clip_grad_norm_() for it, and
                torch.nn.utils.clip_grads_with_norm_() takes a norm
            """,
            "warning",
        ),
    },
    "weight-jump": {
        "emptied": _Kind(f"{_WRITTEN} set them to 0 before step {{since}}"),
        "restored": _Kind(f"{_WRITTEN} restored their values of step {{number:.0f}} before step {{since}}"),
        "replaced": _Kind(f"{_WRITTEN} replaced their values before step {{since}}"),
    },
    "sibling": {
        "large": _Kind("the root mean square of {names} is {number:.3g}, as of codes of FP8 without their scale"),
    },
    "kept-gradient": {
        "kept": _Kind(
            "the gradients of {all_names} were not cleared after the optimizer's step in {number:.0f} sampled steps,"
            " so the next gradients were added to them"
        ),
        "all_kept": _Kind(
            "the gradients of all parameters were not cleared after the optimizer's step in {number:.0f} sampled"
            " steps, so the next gradients were added to them"
        ),
    },
    "replicas-differ": {
        "differs": _Kind("{names}: ranks that had the same values now have different ones"),
        "differs_from_start": _Kind(
            "{names}: ranks have had different values since before the first step, and nothing marks them as sharded",
            """
                If the ranks train one model, broadcast its parameters from rank 0, as
                DistributedDataParallel does, and average the gradients. If they hold different parts,
                pass scope= to the session
            """,
            "note",
        ),
    },
    "no-reduction": {
        "no_reduction": _Kind(
            "{names}: ranks had the same values before the first step and now have different ones, as do most"
            " parameters; no wrapper that averages gradients was found"
        ),
        "no_sum": _Kind(
            "{names}: ranks had the same values before the first step and now have different ones, while other"
            " parameters are sharded or differ by rank",
            """
                Ranks that hold parts of a layer, as in tensor or expert parallelism, compute parts of
                the gradients of what they share: all-reduce their sum over these ranks before the
                optimizer step. DistributedDataParallel would average them; use it only over ranks with
                other data
            """,
        ),
    },
}


RULE_OF: Mapping[str, str] = {what: rule for rule, kinds in _KINDS.items() for what in kinds}


@dataclass(kw_only=True)
class ParameterRule(RuleCheck):
    """A rule on the events that report parameters; ``on_several_ranks``: it applies only to several ranks."""

    rule: str
    on_several_ranks: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.applies = not self.on_several_ranks
        self._missing: dict[str, set[str]] = {}
        self._unmatched: Sequence[str] = ()

    @property
    def why_not(self) -> str:
        if self._unmatched and not self.on_several_ranks:
            return (
                f"the tensors that {' and '.join(self._unmatched)} steps are neither weights of the model nor found as"
                " their master weights, by shape, order and values"
            )
        return super().why_not

    def facts(self, facts: Facts) -> Sightings:
        if self.on_several_ranks:
            self.applies = facts.settings.ranks > 1
        return ()

    def event(self, event: Event) -> Sightings:
        if event.kind != "parameters":
            return
        if self.rule in event.data.get("checked", ()):
            self.note_data(event.iteration)
        self._unmatched = event.data.get("unmatched", ())
        for row in event.data.get("problems", ()):
            if row["what"] in _KINDS[self.rule]:
                yield from self._sightings(row)

    def _sightings(self, row: Row) -> Sightings:
        what = row["what"]
        names = row["names"]
        kind = _KINDS[self.rule][what]
        more = f" and {many(len(names) - 1, 'more parameter')}" if len(names) > 1 else ""
        all_names = fold_for_sentence(*names, most=_MOST_NAMES)
        seen = kind.seen.format(**{**row, "names": f"{names[0]}{more}", "all_names": all_names})
        sighting = Sighting(seen, layers_of(names), "", "", row["since"], kind.severity, key=what, remedy=kind.remedy)
        if what != "arrived":
            yield sighting
        if what in ENDS_BY_A_GRADIENT:
            self._missing.setdefault(what, set()).update(names)
        # A problem ends once none of its parameters has it any more.
        for problem, missing in self._missing.items() if what == "arrived" else ():
            if missing and missing <= set(names):
                yield sighting._replace(key=problem, replaces=True)
            missing.difference_update(names)


def layers_of(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in names if name))


def _has_16_bit_weights(facts: Facts) -> bool | None:
    dtypes = [layer.weight_dtype for layer in facts if layer.weight_dtype]
    return any("float16" in dtype for dtype in dtypes) if dtypes else None


_COLLECT_UPDATES = "the default config, or a section named default_statistics"
_COLLECT = "at least 6 steps of the optimizer"

RULES = (
    Rule(
        id="stale-weights",
        title="a layer uses stale cached weights of an earlier step",
        subject="tensor",
        needs="a forward with is_first_microbatch=False in a collection step",
        collect="any statistic of the layer",
        condition="""
            at least {limit:g} % of the elements of a cached weight differ from the current weight by more than
            rounding, in {needed} collection steps in a row
        """,
        silent="micro-batches 2 to n of a step, frozen weights, learning rates too small to change a code",
        severity="error",
        source="arithmetic; the threshold is this project's",
        why="the layer keeps using the weights of an earlier step, so training it has no effect",
        disproof="the weights are fixed on purpose",
        remedy="""
            Pass is_first_microbatch=True in the first micro-batch after each optimizer step; in Megatron call
            set_is_first_microbatch() of each model chunk. Collection steps on the debug path refresh the cache, so the
            run differs without the debugger
        """,
        check=lambda: AboveLimit(
            statistic=STALE,
            limit=3.0,
            needed=2,
            seen="{:.3g} % of the elements of the cached weight differ from the current weight",
        ),
    ),
    Rule(
        id="lost-updates",
        title="the optimizer's updates vanish in rounding",
        subject="model",
        needs=f"{UNCHANGED_SHARE}, of weights in 16 bits or fewer that an optimizer steps without master weights",
        collect=f"{_COLLECT_UPDATES}; not needed with master weights",
        condition="""
            at least {limit:g} % of the sampled elements with a gradient are unchanged by a step, in {needed} collection
            steps in a row, at a learning rate of at least 1 % of its largest
        """,
        silent="master weights, Kahan summation and stochastic rounding; the end of a decay to 0",
        source="this project: bfloat16 keeps 8 bits, so an update below 1/256 to 1/512 of a weight is lost",
        why="the loss stops falling, whatever the precision of the GEMMs",
        disproof="the same run with master weights in float32 has the same loss",
        remedy="""
            Raise the learning rate if it is far below the usual one. Otherwise use float32 master weights or stochastic
            rounding
        """,
        cost="four more bytes per weight",
        check=lambda: AboveLimit(
            statistic=UNCHANGED_SHARE,
            limit=90.0,
            needed=2,
            seen="{:.3g} % of the weights in 16 bits or fewer are unchanged by an optimizer step",
            applies_to=_has_16_bit_weights,
            remedy=remedy_of_small_gradients,
        ),
        consequence_of=("below-eps",),
    ),
    Rule(
        id="below-eps",
        title="gradients are below Adam's eps",
        subject="model",
        needs=f"{BELOW_EPS}, of optimizers of Adam's kind that step the model's own weights",
        collect=_COLLECT_UPDATES,
        condition="""
            the root mean square of the gradient of at least {limit:g} % of the weights is below the optimizer's eps,
            and above 0, in {needed} collection steps in a row
        """,
        silent="single weights, such as those of rare tokens",
        source="arithmetic of Adam: with sqrt(v) below eps the update is about lr * g / eps; this project: the share",
        why="updates are far smaller than the learning rate, so the model hardly learns",
        disproof="eps is large on purpose",
        remedy="""
            Look for a loss that is scaled down or averaged twice, and for gradients clipped to a tiny norm; otherwise
            lower eps to 1 % of the gradients or less
        """,
        check=lambda: AboveLimit(
            statistic=BELOW_EPS,
            limit=90.0,
            needed=2,
            seen="{:.3g} % of the weights have gradients below the optimizer's eps",
            applies_to=lambda facts: facts.settings.adds_eps,
            remedy=remedy_of_small_gradients,
        ),
    ),
    Rule(
        id="missing-gradient",
        title="a parameter gets no gradient, or no optimizer steps it",
        subject="layer",
        needs="at least 6 steps of a torch.optim optimizer, or a gradient for each of its parameters",
        collect=_COLLECT,
        condition=f"""
            a parameter receives no gradient in {WITHOUT_GRADIENT} steps of its optimizer, or in {MOST_IDLE} steps if
            its module does not run while a similar parameter has a gradient. Or a parameter that had gradients receives
            none in {LOST} steps in which its module runs, twice its longest gap so far. Or a parameter has gradients,
            and no optimizer of the process contains it. A parameter with requires_grad=False in an optimizer is a note,
            and so is one without a gradient other than 0 for {IDLE} steps while similar ones have others, as of an
            expert without tokens. A gradient that comes later makes the finding a note
        """,
        silent="""
            frozen parameters, and copies such as an EMA, that are not in an optimizer; optimizers that step less often
            than others; gradients that are 0, or removed before the optimizer step
        """,
        source="Megatron-LM issue 4765, TransformerEngine pull requests 3178 and 3234; this project",
        why="the parameter does not train, although the loss may still fall",
        disproof="""
            the parameter is unused or fixed on purpose: then set requires_grad=False, and remove it from the optimizer
        """,
        remedy="""
            Look for detach() or no_grad() after the layer, a keyword tensor in te.checkpoint (pass it by position, or
            set use_reentrant=False), or a module that forward() no longer calls
        """,
        check=lambda: ParameterRule(rule="missing-gradient"),
        essential=True,
    ),
    Rule(
        id="frozen-weight",
        title="a weight does not change, or does not follow its master weight",
        subject="layer",
        needs="some sampled steps of a torch.optim optimizer",
        collect=_COLLECT,
        condition=f"""
            a weight is bit-identical before {UNCHANGED} sampled steps within at least {SPAN} steps, although each of
            them changed it, or the copy of it that the optimizer holds. Or, in {APART_CHECKS} consecutive checks, at
            least {100 * APART:g} % of its sampled elements differ from the optimizer's float32 master weight by more
            than rounding. The finding is a warning in three cases. (1) For {UNSTEPPED} steps, optimizers that stepped
            before do not step, or step with a learning rate of 0. (2) The gradients of at least {100 * NEARLY_ALL:g} %
            of the matrices are 0 in {SPAN + 1} steps in a row. (3) In at least {SPAN} steps, at most
            {100 * FEW_CHANGED:g} % of the sampled elements of at least {100 * NEARLY_ALL:g} % of the float32 matrices
            change
        """,
        silent="""
            updates of 16-bit weights lost in rounding (see lost-updates); frozen weights; steps that a GradScaler
            skips; master weights that are sharded or not in float32, which are not compared
        """,
        severity="error",
        source="Megatron-LM issues 2272, 4800, 5236, 5487, 5707 and 6754; the thresholds are this project's",
        why="the forward uses weights that the training does not change",
        disproof="the weight is fixed on purpose: then set requires_grad=False",
        remedy="""
            Check whether the optimizer updates a copy of the weight, for example because the model was converted or
            moved after creating the optimizer. Look for code that restores old weights
        """,
        check=lambda: ParameterRule(rule="frozen-weight"),
        essential=True,
        consequence_of=("missing-gradient", "dead-gradient", "frozen-layer"),
    ),
    Rule(
        id="learning-rate",
        title="the learning rate rises again after its schedule has ended, or weight decay is too large",
        subject="model",
        needs="a torch.optim optimizer over the weights or their float32 master weights",
        collect="at least one step of the optimizer",
        condition="""
            the learning rate falls to 0.5 % of its largest value, and then rises in 5 steps to 5 % of it again. Or the
            learning rate times weight_decay=, in a step of SGD or of a torch optimizer with decoupled decay, is 0.02 or
            more
        """,
        silent="warm restarts, which rise in one step; learning rates in tensors on a device; Adam's coupled decay",
        source="torch's CosineAnnealingLR, which rises again after T_max steps; this project",
        why="the weights leave the minimum that the schedule has reached, or lose what they learn",
        disproof="the schedule is cyclic on purpose, or the weights should shrink",
        remedy="""
            End the training where the schedule ends, or make the schedule as long as the training: check its number of
            steps, and whether the scheduler steps more than once per optimizer step
        """,
        check=lambda: ParameterRule(rule="learning-rate"),
    ),
    Rule(
        id="kept-gradient",
        title="gradients are not cleared between optimizer steps",
        subject="layer",
        needs="3 sampled steps of a torch.optim optimizer, each followed by a backward that adds to .grad",
        collect=_COLLECT,
        condition="""
            whenever autograd adds to the gradient of a parameter between two steps of its optimizer, that gradient is
            not 0, in 3 consecutive sampled steps
        """,
        silent="""
            gradients that autograd does not add to .grad: those of FSDP's shards and Megatron's main_grad, or assigned
            by the script
        """,
        source="arithmetic; the number of steps is this project's",
        why="each step repeats all gradients since the start",
        disproof="gradients accumulate over several optimizer steps on purpose",
        remedy="""
            Call optimizer.zero_grad() after each optimizer step. With several micro-batches, step the optimizer only
            after the last one
        """,
        check=lambda: ParameterRule(rule="kept-gradient"),
    ),
    Rule(
        id="replicas-differ",
        title="parameters that should be the same on all ranks differ",
        subject="layer",
        needs="a session on several ranks that reduce statistics together, and parameters that are not sharded",
        collect=_COLLECT,
        condition="""
            the checksum of about 1,000 elements of a parameter differs between ranks by more than 1e-6 relative to
            their absolute values, although it was equal before the first step, or although DistributedDataParallel
            wraps the model
        """,
        silent="""
            DTensors, FSDP, tensor-parallel shards, experts, DeepSpeed ZeRO 3; parameters that differ before the first
            step, and constant parameters if others differ then
        """,
        severity="error",
        source="transformers issue 48205, TransformerEngine pull request 2698; arithmetic",
        why="each rank computes gradients for a different model, so their mean is wrong for all ranks",
        disproof="the ranks average weights only every few steps, as local SGD does",
        remedy="""
            All-reduce the gradients before the optimizer step: for norms under sequence parallelism over the
            tensor-parallel group, for routers over the expert-parallel group. A distributed optimizer must gather all
            updated weights. Then load a checkpoint on all ranks
        """,
        check=lambda: ParameterRule(rule="replicas-differ", on_several_ranks=True),
        essential=True,
        consequence_of=("no-reduction", "resume"),
    ),
    Rule(
        id="no-reduction",
        title="several ranks train, and their gradients are not averaged",
        subject="model",
        needs="a session on several ranks that reduce statistics together, and parameters that are not sharded",
        collect=_COLLECT,
        condition="""
            more than half of the parameters that were equal on all ranks before the first step now differ, and the
            process has no DistributedDataParallel, FSDP or DeepSpeed engine
        """,
        silent="the same cases as replicas-differ",
        source="arithmetic",
        why="each rank trains a separate model on its part of the data",
        disproof="the ranks average weights only every few steps, as local SGD does",
        remedy="""
            If each rank trains the whole model on its own data, wrap the model in DistributedDataParallel or FSDP, or
            call accelerator.prepare(). If ranks compute parts of one batch, all-reduce the sum of their gradients
        """,
        check=lambda: ParameterRule(rule="no-reduction", on_several_ranks=True),
    ),
)
