"""`weaver-hf doctor`: why a Weaver accepts less than it should, or runs slower.

What can be declared wrongly while all shapes fit (taps, alignment, mask token, causality, window, rotary base, dtype)
is found by trying: the drafter runs over text of the target as declared and under each neighbouring setup, and the one
that is clearly better is what was meant. The rest is compared with what the artifact records.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.utils import import_utils

from .configuration_weaver import WeaverConfig
from .errors import CheckpointError, WeaverError
from .modeling_weaver import WeaverModel
from .probe import (
    QUESTIONS,
    Probe,
    Scores,
    Setup,
    difference,
    fingerprint,
    identity,
    neighbours,
    questions,
    rendered,
    write_text,
)
from .target.attach import head_device, unwrap
from .target.families import family_of
from .training.data import Sequences

__all__ = ["Finding", "Report", "examine", "record"]

LEAST_TOP1 = 0.1  # right first tokens of a drafter that is this target's
KEPT = 0.8  # of the recorded acceptance: less is worth a word
STEP_TOKENS = 24  # decoded with and without the Weaver


@dataclass(frozen=True)
class Finding:
    """What one check says.

    Attributes:
        name: of what was checked.
        status: `"ok"`, `"warn"` (it works, but not as well as it could, or not as recorded) or `"fault"`.
        found, expected: what there is and what there should be.
        fix: what to do; empty where nothing needs to be done.
    """

    name: str
    status: str
    found: str
    expected: str = ""
    fix: str = ""


@dataclass
class Report:
    """All findings, and the acceptance that was measured.

    Attributes:
        accepted: drafted tokens that chains accept a step of the target's own text, as declared; None where the
            drafter could not be run.
        repaired: the same with the faults of its settings corrected.
        top1: share of right tokens by depth, as declared.
        identity: of target and tokenizer, see `probe.identity`.
    """

    findings: list[Finding] = field(default_factory=list)
    accepted: float | None = None
    repaired: float | None = None
    top1: list[float | None] = field(default_factory=list)
    identity: dict[str, str | None] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Nothing is a fault."""
        return all(finding.status != "fault" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **asdict(self)}


def faults_of(name: str, error: WeaverError) -> Finding:
    """A refusal as a finding."""
    return Finding(name, "fault", error.found, error.expected, error.fix)


@dataclass
class Case:
    """What the checks look at.

    Attributes:
        target: unwrapped.
        tokenizer: the target's.
        weaver: attached to it or not.
        given_text: what the target wrote, None: it is asked.
    """

    target: Any
    tokenizer: Any
    weaver: WeaverModel
    given_text: Sequences | None = None

    @cached_property
    def text(self) -> Sequences:
        return self.given_text or write_text(self.target, questions(self.tokenizer))

    @cached_property
    def fits(self) -> bool:
        """The drafter can be run on this target's states, embedding and head."""
        text, config = self.target.config.get_text_config(), self.weaver.config
        return (
            self.weaver.drafter is not None
            and (config.hidden_size, config.vocab_size) == (text.hidden_size, text.vocab_size)
            and all(0 <= tap < text.num_hidden_layers for tap in config.target_layer_ids)
            and 0 <= config.mask_token_id < text.vocab_size
            and not self.broken
        )

    @cached_property
    def broken(self) -> list[str]:
        """Weights that are not numbers."""
        return [name for name, weight in self.weaver.named_parameters() if not bool(weight.isfinite().all())]

    @cached_property
    def identity(self) -> dict[str, str | None]:
        return identity(self.target, self.tokenizer)

    def recorded(self, name: str) -> Any:
        """What the artifact records under this name (see `record`), None where it records nothing."""
        return (self.weaver.config.probe or {}).get(name)

    @cached_property
    def probe(self) -> Probe:
        return Probe(self.target, self.weaver, self.text)

    @cached_property
    def repairs(self) -> list[tuple[str, Setup, Scores]]:
        """The setups that lead from the declared one to the best, each by its name: one change at a time."""
        probe, setup = self.probe, self.probe.declared
        found: list[tuple[str, Setup, Scores]] = []
        while True:
            done = {name for name, _, _ in found}
            options = [
                (name, other) for name, other in neighbours(self.target, self.tokenizer, setup) if name not in done
            ]
            scored = [(name, other, probe.scores(other)) for name, other in options]
            better = [step for step in scored if step[2].clearly_better_than(probe.scores(setup))]
            if not better:
                return found
            found.append(max(better, key=lambda step: float(step[2].expected.mean())))
            setup = found[-1][1]

    @cached_property
    def repaired(self) -> Setup:
        return self.repairs[-1][1] if self.repairs else self.probe.declared


# ---- the checks ----


def check_weights(case: Case) -> list[Finding]:
    """Are all weights numbers?"""
    if not case.broken:
        return [Finding("weights", "ok", "finite weights")]
    shown = ", ".join(case.broken[:5]) + (f" and {len(case.broken) - 5} more" if len(case.broken) > 5 else "")
    fix = "Take an earlier checkpoint of the training, or download the file again."
    return [Finding("weights", "fault", f"NaN or infinite values in {shown}", "finite weights", fix)]


def check_shape(case: Case) -> list[Finding]:
    """Do the sizes that the artifact declares fit the target?"""
    try:
        case.weaver.config.check_target(case.target.config)
    except WeaverError as error:
        names = {"vocab_size": "vocabulary", "mask_token_id": "mask_token", "target_layer_ids": "taps"}
        return [faults_of(next((n for key, n in names.items() if key in error.found), "target"), error)]
    text = case.target.config.get_text_config()
    sizes = f"hidden size {text.hidden_size}, {text.num_hidden_layers} layers, {text.vocab_size} tokens"
    return [Finding("vocabulary", "ok", sizes)]


def check_tokenizer(case: Case) -> list[Finding]:
    """Is the tokenizer the target's, and the one that the artifact was made with?"""
    known, size = len(case.tokenizer), case.target.config.get_text_config().vocab_size
    recorded = case.recorded("vocabulary")
    if known > size:
        fix = "Load the tokenizer from the target's own folder."
        return [Finding("tokenizer", "fault", f"{known} tokens", f"at most the target's {size}", fix)]
    if recorded is None:
        return [Finding("tokenizer", "ok", f"{known} tokens; the artifact records no tokenizer to compare with")]
    if recorded != case.identity["vocabulary"]:
        found = f"a vocabulary {str(case.identity['vocabulary'])[:12]}"
        fix = "Load the tokenizer that the target was trained with: token ids mean other texts under this one."
        return [Finding("tokenizer", "fault", found, f"{recorded[:12]}, the artifact's", fix)]
    return [Finding("tokenizer", "ok", f"the vocabulary that the artifact records ({recorded[:12]})")]


def check_template(case: Case) -> list[Finding]:
    """Does a user's turn read as it did when the drafter was made? If not, is it another thinking mode?"""
    recorded = case.recorded("turn")
    modes = thinking_modes(case)
    if recorded is None and modes and case.fits:
        return [thinking_by_acceptance(case, modes)]
    if recorded is None:
        return [Finding("template", "ok", "the artifact records no chat template to compare with")]
    if recorded == case.identity["turn"]:
        return [Finding("template", "ok", "user turns as the artifact records them")]
    for thinking, turn in modes.items():
        if recorded == turn:
            found = f"a chat template with enable_thinking {not thinking} by default"
            fix = f"Pass enable_thinking={thinking} to apply_chat_template, or take a drafter made for this mode."
            return [Finding("thinking", "warn", found, f"{thinking}, as when the drafter was made", fix)]
    found = f"a user's turn that begins {rendered(case.tokenizer, QUESTIONS[0])[:40]!r}"
    fix = "Take the chat template of the target's own folder; a drafter knows the turns that it was made with."
    return [Finding("template", "fault", found, "the turn that the artifact records", fix)]


def thinking_modes(case: Case) -> dict[bool, str]:
    """What identifies a turn in each thinking mode; empty where the template knows no such mode."""
    if not case.tokenizer.chat_template:
        return {}
    turns = {mode: rendered(case.tokenizer, QUESTIONS[0], enable_thinking=mode) for mode in (True, False)}
    if turns[True] == turns[False]:
        return {}
    return {mode: fingerprint(turn) for mode, turn in turns.items()}


def thinking_by_acceptance(case: Case, modes: dict[bool, str]) -> Finding:
    """Without a record, the mode that the drafter was made for is the one in which it accepts more."""
    current = next((mode for mode, turn in modes.items() if turn == case.identity["turn"]), True)
    other = write_text(case.target, questions(case.tokenizer, enable_thinking=not current))
    here = case.probe.scores(case.repaired).mean
    there = Probe(case.target, case.weaver, other).scores(case.repaired).mean
    found = f"{here:.2f} accepted with enable_thinking {current}, {there:.2f} with {not current}"
    if here >= KEPT * there:
        return Finding("thinking", "ok", found)
    fix = f"Pass enable_thinking={not current} to apply_chat_template, or take a drafter made for this mode."
    return Finding("thinking", "warn", found, "no less in the default mode", fix)


def check_setup(case: Case) -> list[Finding]:
    """Would the drafter accept clearly more under a neighbouring setup?"""
    if not case.fits:
        return []
    findings, before = [], case.probe.declared
    for name, setup, scores in case.repairs:
        gain = f"{case.probe.scores(before).mean:.2f} accepted a step as declared, {scores.mean:.2f} instead"
        was, better, fix = difference(name, before, setup)
        findings.append(Finding(name, "fault", f"{was} ({gain})", better, fix))
        before = setup
    tried: dict[str, list[float]] = {}
    wrong = {name for name, _, _ in case.repairs}
    for name, setup in neighbours(case.target, case.tokenizer, case.repaired):
        if name not in wrong and name != "dtype":  # of which `check_dtype` speaks
            tried.setdefault(name, []).append(case.probe.scores(setup).mean)
    best = case.probe.scores(case.repaired).mean
    for name, means in tried.items():
        findings.append(Finding(name, "ok", f"{best:.2f} accepted a step; {max(means):.2f} with the best other"))
    return findings


def check_drafter(case: Case) -> list[Finding]:
    """Is it this target's drafter at all, and as good as it was?"""
    if case.weaver.drafter is None:
        return [Finding("drafter", "ok", "none: drafts come from the text alone (builder 'suffix')")]
    if not case.fits:
        return []
    scores = case.probe.scores(case.repaired)
    first = scores.top1[0] or 0.0
    found = f"{first:.0%} right first tokens, {scores.mean:.2f} accepted a step"
    if first < LEAST_TOP1:
        fix = "Load the drafter that was made for this target: the sizes fit, the weights do not."
        return [Finding("drafter", "fault", found, f"at least {LEAST_TOP1:.0%}", fix)]
    recorded = case.recorded("accepted")
    if recorded is None:
        return [Finding("drafter", "ok", f"{found}; the artifact records no acceptance to compare with")]
    if scores.mean < KEPT * recorded:
        fix = "See the other findings; if there are none, the target differs from the drafter's, or the texts do."
        return [Finding("drafter", "warn", found, f"{recorded:.2f}, as the artifact records", fix)]
    return [Finding("drafter", "ok", f"{found}; {recorded:.2f} are recorded")]


def check_target(case: Case) -> list[Finding]:
    """Are these the target's weights that the artifact was made for?"""
    recorded, mine = case.recorded("weights"), case.identity["weights"]
    made_for, name = case.weaver.config.base_model_name_or_path, case.target.name_or_path
    fix = "Nothing, if the acceptance suffices; otherwise train the drafter on with this target's own text."
    measured = f"{case.probe.scores(case.repaired).mean:.2f} accepted a step" if case.fits else "no acceptance measured"
    if None not in (recorded, mine) and recorded != mine:
        found = f"other weights ({str(mine)[:12]}), fine-tuned or quantised, with {measured}"
        return [Finding("target", "warn", found, f"{str(recorded)[:12]}, the artifact's", fix)]
    if recorded is None and made_for and made_for != name:
        return [Finding("target", "warn", f"{name}, with {measured}", f"{made_for}, which the artifact names", fix)]
    known = "the artifact records no weights to compare with" if None in (recorded, mine) else "the recorded weights"
    return [Finding("target", "ok", known)]


def check_adapter(case: Case) -> list[Finding]:
    """Does the adapter add to the drafter, and is the pool that it chooses from large enough?"""
    weaver = case.weaver
    if weaver.adapter is None:
        return []
    if not weaver.has_adapter:
        fix = "Load trained weights: `WeaverModel.from_pretrained(drafter, adapter=...)`, or a PEFT folder."
        return [Finding("adapter", "fault", "an adapter that is only declared", "its weights", fix)]
    if not bool(weaver.adapter.lm_head_query_in.weight.any()):
        fix = "Train it (`weaver-hf train adapter`), or set the builder to marginal."
        return [Finding("adapter", "fault", "an adapter that changes no score (a zero lm_head_query_in)", "", fix)]
    if not case.fits:
        return []
    trained = weaver.adapter.config.pool_size
    try:
        pool = weaver.pool_size(weaver.tree_config)
    except WeaverError as error:
        return [faults_of("pool", error)]
    drafter, adapter = case.probe.scores(case.repaired), case.probe.adapter_scores(case.repaired, pool)
    found = f"{adapter.mean:.2f} accepted a step by its best tokens, {drafter.mean:.2f} by the drafter's"
    fix = "Load the adapter that was trained on this drafter, or set the builder to marginal."
    good = adapter.mean >= drafter.mean and not math.isnan(float(adapter.log_q.nanmean()))
    findings = [Finding("adapter", "ok", found) if good else Finding("adapter", "fault", found, "more, not less", fix)]
    reach, most = case.probe.reach(case.repaired, [pool, trained])
    found = f"a pool of {pool}, of which the best chains accept {reach:.2f} a step"
    if reach >= KEPT * most:
        return [*findings, Finding("pool", "ok", found)]
    fix = "Set `weaver.tree_config.pool = None`."
    return [*findings, Finding("pool", "fault", found, f"{most:.2f}, which the trained pool of {trained} has", fix)]


def check_dtype(case: Case) -> list[Finding]:
    """Is the target in a dtype that it was trained for?"""
    if case.fits and any(name == "dtype" for name, _, _ in case.repairs):
        return []  # the drafter suffers from it: `check_setup` says so
    stored = getattr(case.weaver.config, "dtype", None)
    found = f"target in {case.target.dtype}, Weaver stored in {stored}".replace("torch.", "")
    if case.target.dtype == torch.float16:
        fix = "Load it with dtype=torch.bfloat16: models trained in bfloat16 overflow in float16."
        return [Finding("dtype", "warn", found, "bfloat16 or float32", fix)]
    return [Finding("dtype", "ok", found)]


def check_path(case: Case) -> list[Finding]:
    """Does a step run, through our forwards, and what makes it slow?"""
    target, weaver = case.target, case.weaver
    family = family_of(target)
    for module in [*family.mixers_of(target), *family.attentions_of(target)]:
        bound = module.__dict__.get("forward")
        if bound is not None and not hasattr(module, "_hf_hook"):
            owner = getattr(bound, "__module__", None) or type(bound).__module__
            found = f"a {type(module).__name__} whose forward was replaced by {owner}"
            fix = "Undo that kernel or patch before attaching: trees are verified by the layer's own forward."
            return [Finding("path", "fault", found, "the class's own forward", fix)]
    if weaver.drafter is not None and not case.fits:
        return []
    was_attached = weaver.target is target
    ids = torch.tensor([questions(case.tokenizer)[0]], device=target.device)
    options: dict[str, Any] = {
        "max_new_tokens": STEP_TOKENS,
        "do_sample": False,
        "attention_mask": ids.new_ones(ids.shape),
    }
    stats = weaver.stats
    try:
        weaver.attach(target)
        assisted = target.generate(ids, assistant_model=weaver, **options)
        tokens = weaver.stats.tokens_per_step if weaver.stats else math.nan
        plain = target.generate(ids, **options)
    except WeaverError as error:
        return [faults_of("path", error)]
    finally:
        weaver.stats = stats
        if not was_attached and weaver.target is target:
            weaver.detach()
    ran = f"{tokens:.2f} tokens a step on {target.device.type}"
    if target.dtype == torch.float32 and assisted.tolist() != plain.tolist():
        fix = "Run `weaver-hf certify` on it."
        return [Finding("path", "fault", f"another text than stock's ({ran})", "the same in float32", fix)]
    return slow_parts(case, ran) or [Finding("path", "ok", ran)]


def slow_parts(case: Case, ran: str) -> list[Finding]:
    """What is known to make a step slow here."""
    target, slow = case.target, []
    devices = {parameter.device.type for parameter in target.parameters()}
    if "meta" in devices:
        slow.append(("weights that are moved to the device for every pass", "Use a quantised target or a larger card."))
    if torch.cuda.is_available() and devices == {"cpu"}:
        slow.append(("a target on the CPU beside an idle GPU", 'Load it with device_map="cuda".'))
    if "cuda" in devices and not import_utils.is_flash_linear_attention_available():
        slow.append(("stock prefill in plain torch", "pip install flash-linear-attention"))
    if target.training:
        slow.append(("a target in training mode", "Call `model.eval()`."))
    return [Finding("path", "warn", f"{found} ({ran})", "", fix) for found, fix in slow]


CHECKS: Sequence[Callable[[Case], list[Finding]]] = (
    check_weights,
    check_shape,
    check_tokenizer,
    check_dtype,
    check_setup,
    check_drafter,
    check_target,
    check_template,
    check_adapter,
    check_path,
)


def examine(
    model: Any,
    tokenizer: Any,
    weaver: WeaverModel,
    text: Sequences | None = None,
    progress: Callable[[Sequence[Any]], Any] = lambda checks: checks,
) -> Report:
    """Run every check on a target and a Weaver, which goes to the target's device and dtype, as attaching does.

    Args:
        model: a supported target, also inside a PEFT wrapper.
        tokenizer: its own.
        weaver: attached or not.
        text: from `write_text`, where it is known already.
        progress: wraps the checks.

    Raises:
        UnsupportedModelError: the model's family is not supported.
    """
    case = Case(unwrap(model).eval(), tokenizer, weaver, text)
    family_of(case.target)
    weaver.to(device=head_device(case.target), dtype=case.target.dtype)
    report = Report()
    for check in progress(CHECKS):
        report.findings += check(case)
    if case.fits:
        declared = case.probe.scores(case.probe.declared)
        report.accepted, report.top1 = declared.mean, declared.top1
        report.repaired = case.probe.scores(case.repaired).mean
        report.identity = case.identity
    return report


def record(report: Report, folder: Path) -> None:
    """Write what was measured into the artifact's config.json, for later examinations to compare with.

    Raises:
        CheckpointError: the Weaver is not healthy or has no drafter, or the folder is not one of ours.
    """
    path = folder / "config.json"
    described = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if described.get("model_type") != WeaverConfig.model_type:
        fix = "Write one with `weaver-hf convert` first."
        raise CheckpointError(f"no config.json of a Weaver in {folder}", "a local artifact in our own layout", fix)
    if not report.healthy or report.accepted is None:
        fix = "Correct what the findings say, and examine it again."
        raise CheckpointError("a Weaver that is not healthy, or has no drafter", "one whose acceptance is known", fix)
    described["probe"] = {"accepted": round(report.accepted, 4), **report.identity}
    path.write_text(json.dumps(dict(sorted(described.items())), indent=2) + "\n", encoding="utf-8")
