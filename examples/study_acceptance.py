"""What each builder's trees are accepted for, against what the drafter's pools would allow.

    python examples/study_acceptance.py --prompts 30 --tokens 256 --json study.json --markdown study.md --figure a.png

Every text is decoded once by `generate`, each with another of the study's settings; all settings are then replayed
along it (study_replay.py), and the replay of the one that wrote it must give that call's own runs. Parts of a study
may run apart, each with its own `--domain` or `--skip` and `--json`; `--read` puts their files together.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable
from study_replay import ORACLE, POOLS, Recording, Setting, Text, by_depth, replay, write_text
from torch import Tensor

from weaver_hf import WeaverModel, load_tiny
from weaver_hf.bench import DOMAINS, Prompt, load_prompts
from weaver_hf.bench.harness import environment
from weaver_hf.proposal import BUILDERS

BUILDER_ROWS = ("suffix", "chain", "marginal", "weaver-paper", "weaver", ORACLE)
SAMPLES = 2000  # of the bootstrap
ABLATIONS: dict[str, dict[str, int]] = {
    **{f"pool {pool}": {"pool": pool} for pool in POOLS[:-1]},
    "8 rounds": {"rounds": 8},
    "32 rounds": {"rounds": 32},
    "4 children": {"children": 4},
    "8 children": {"children": 8},
    "32 children": {"children": 32},
}


class Column(NamedTuple):
    """One way to count: the rule that texts are accepted by, and whether steps behind the onset of a loop count."""

    name: str
    temperature: float
    rule: str
    loop_free: bool = False


def columns_at(temperature: float) -> list[Column]:
    return [
        Column(f"T = {temperature:g}, sample", temperature, "sample"),
        Column(f"T = {temperature:g}, coupled", temperature, "coupled"),
        Column("T = 0", 0.0, "greedy"),
        Column("T = 0, loop-free", 0.0, "greedy", loop_free=True),
    ]


@dataclass
class Results:
    """What the study counted.

    Attributes:
        domains: of each prompt; texts of all temperatures are in this order.
        runs: for each column and setting, the runs of each prompt that enter the means.
        depths: for each column, counts by depth, see `by_depth`.
        replayed, different: texts whose writer was replayed, and how often that gave other runs than `generate`.
    """

    domains: list[str]
    columns: list[Column]
    runs: dict[tuple[str, Setting], list[list[int]]] = field(default_factory=dict)
    depths: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    replayed: int = 0
    different: int = 0

    def add_depths(self, column: str, counts: dict[str, Tensor]) -> None:
        known = self.depths.setdefault(column, {})
        for name, count in counts.items():
            known[name] = known.get(name, 0) + count


def can_run(builder: str, rule: str) -> bool:
    """Whether a builder can be coupled."""
    return rule != "coupled" or builder == ORACLE or getattr(BUILDERS[builder], "needs_block", False)


def run_study(
    model: Any,
    tokenizer: Any,
    weaver: WeaverModel,
    prompts: Sequence[Prompt],
    *,
    budgets: Sequence[int],
    new_tokens: int,
    temperature: float = 1.0,
    ablations: int | None = None,
    skip: int = 0,
    seed: int = 0,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Results:
    """Write the texts and replay every setting along them.

    Args:
        prompts: those of a domain next to each other; a domain is recorded at once.
        budgets: of every builder.
        ablations: budget of the ablations of builder `weaver`, None for none.
        skip: prompts of each domain that come before these; a prompt has its own seed, whatever else is studied.
        progress: wraps the parts of the work.
    """
    results = Results([prompt.domain for prompt in prompts], columns_at(temperature))
    rules = {temperature: ["sample", "coupled"], 0.0: ["greedy"]}
    groups = [(d, [p for p in prompts if p.domain == d]) for d in dict.fromkeys(results.domains)]
    for at, (domain, group) in progress(list(itertools.product(rules, groups))):
        grid = itertools.product(BUILDER_ROWS, budgets, rules[at])
        settings = [Setting(builder, budget, rule) for builder, budget, rule in grid if can_run(builder, rule)]
        writers = [s for s in settings if s.builder != ORACLE]
        if ablations is not None:
            changes = itertools.product(rules[at], ABLATIONS.values())
            settings += [Setting("weaver", ablations, rule, **change) for rule, change in changes]
        texts = []
        for index, prompt in enumerate(group):
            number = 1000 * list(DOMAINS).index(domain) + skip + index
            writer = writers[number % len(writers)]
            texts.append(
                write_text(
                    model, tokenizer, weaver, prompt, writer,
                    temperature=at, new_tokens=new_tokens, seed=seed + number,
                )
            )  # fmt: skip
        if not any(text.has_steps for text in texts):
            for setting in settings:
                add_runs(results, texts, setting, [[] for _ in texts])
            continue
        recording = Recording(model, weaver, texts, pool=max(*budgets, *POOLS))
        for setting in settings:
            add_runs(results, texts, setting, replay(recording, setting))
        for column in results.columns:
            if column.temperature == at and column.rule != "coupled":
                results.add_depths(column.name, by_depth(recording, column.loop_free))
    return results


def add_runs(results: Results, texts: Sequence[Text], setting: Setting, runs: Sequence[list[int]]) -> None:
    """Count the runs of a setting, and compare them with those of the calls that wrote texts with it."""
    for text, own in zip(texts, runs, strict=True):
        if text.written_by == setting:
            results.replayed += 1
            results.different += text.runs != own
    for column in results.columns:
        if column.temperature == texts[0].temperature and column.rule == setting.rule:
            kept = [t.loop_free(own) if column.loop_free else t.whole(own) for t, own in zip(texts, runs, strict=True)]
            results.runs.setdefault((column.name, setting), []).extend(kept)


# ---- means and intervals -------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return "" if math.isnan(self.value) else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Counts(NamedTuple):
    """Accepted drafted tokens and steps of each prompt, fp64 `[P]` each."""

    tokens: Tensor
    steps: Tensor

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> "Counts":
        steps = torch.tensor([len(run) for run in runs], dtype=torch.float64)
        return cls(torch.tensor([sum(run) for run in runs], dtype=torch.float64) - steps, steps)

    def mean(self, draws: Tensor) -> Tensor:
        """Accepted a step over the prompts of each draw, `[S, P]` -> `[S]`; NaN over no step."""
        return self.tokens[draws].sum(-1) / self.steps[draws].sum(-1)


class Bootstrap:
    """Resamples prompts within their domains, the same for everything that is compared.

    Args:
        domains: of each prompt.
    """

    def __init__(self, domains: Sequence[str], seed: int = 0) -> None:
        self.places = {d: torch.tensor([i for i, x in enumerate(domains) if x == d]) for d in dict.fromkeys(domains)}
        generator = torch.Generator().manual_seed(seed)
        self.draws = torch.zeros(SAMPLES, len(domains), dtype=torch.long)
        for places in self.places.values():
            picks = torch.randint(len(places), (SAMPLES, len(places)), generator=generator)
            self.draws[:, places] = places[picks]

    def estimate(self, value: Callable[[Tensor], Tensor], domain: str | None = None) -> Estimate:
        """A statistic of the prompts (of one domain) with its interval; draws where it is undefined are left out."""
        everyone = torch.arange(self.draws.shape[1])[None]
        which = slice(None) if domain is None else self.places[domain]
        point = float(value(everyone[:, which]))
        low, high = torch.nanquantile(value(self.draws[:, which]), torch.tensor([0.025, 0.975]).double()).tolist()
        return Estimate(point, low, high)

    def mean(self, counts: Counts, domain: str | None = None) -> Estimate:
        """Accepted a step."""
        return self.estimate(counts.mean, domain)

    def gap(self, weaver: Counts, marginal: Counts, oracle: Counts, domain: str | None = None) -> Estimate:
        """(weaver - marginal) / (oracle - marginal): the share of what conditionals could add that the adapter adds."""

        def share(draws: Tensor) -> Tensor:
            base = marginal.mean(draws)
            return (weaver.mean(draws) - base) / (oracle.mean(draws) - base)

        return self.estimate(share, domain)

    def ratio(self, one: Counts, other: Counts) -> Estimate:
        """Geometric mean over domains of the ratio of accepted tokens a step; domains without steps are left out."""

        def geometric(draws: Tensor) -> Tensor:
            ratios = [one.mean(draws[:, x]) / other.mean(draws[:, x]) for x in self.places.values()]
            return torch.stack(ratios).log().nanmean(0).exp()

        return self.estimate(geometric)

    def difference(self, one: Counts, other: Counts) -> Estimate:
        """Of accepted tokens a step, over the same prompts."""
        return self.estimate(lambda draws: one.mean(draws) - other.mean(draws))


# ---- the report ----------------------------------------------------------------------------------------------------


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])

    def rich(self) -> RichTable:
        table = RichTable(*self.header, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        return table


def tables_of(results: Results, budgets: Sequence[int], main: int, ablated: bool, seed: int) -> list[Table]:
    """Everything as tables; `main` is the budget of those that show one alone."""
    bootstrap = Bootstrap(results.domains, seed)
    tables = []

    def counts(column: Column, builder: str, budget: int, **change: int) -> Counts:
        return Counts.of(results.runs[column.name, Setting(builder, budget, column.rule, **change)])

    for column in results.columns:
        builders = [b for b in BUILDER_ROWS if can_run(b, column.rule)]
        rows = [[b, *(str(bootstrap.mean(counts(column, b, n))) for n in budgets)] for b in builders]
        gaps = [bootstrap.gap(*(counts(column, b, n) for b in ("weaver", "marginal", ORACLE))) for n in budgets]
        rows.append(["gap closed", *map(str, gaps)])
        for one, other in (("weaver", "marginal"), ("weaver", "weaver-paper"), ("weaver", "chain"), (ORACLE, "weaver")):
            ratios = [bootstrap.ratio(counts(column, one, n), counts(column, other, n)) for n in budgets]
            rows.append([f"{one} / {other}", *map(str, ratios)])
        tables.append(Table(f"{column.name}: all domains, by budget", ["", *map(str, budgets)], rows))

    for column in results.columns:
        builders = [b for b in BUILDER_ROWS if can_run(b, column.rule)]
        rows = []
        for domain in dict.fromkeys(results.domains):
            means = [str(bootstrap.mean(counts(column, b, main), domain)) for b in builders]
            gap = bootstrap.gap(*(counts(column, b, main) for b in ("weaver", "marginal", ORACLE)), domain=domain)
            rows.append([domain, *means, str(gap)])
        tables.append(Table(f"{column.name}: by domain, {main} nodes", ["", *builders, "gap closed"], rows))

    if ablated:
        rows = []
        for name, change in ABLATIONS.items():
            cells = []
            for column in results.columns:
                usual, changed = counts(column, "weaver", main), counts(column, "weaver", main, **change)
                cells.append(f"{changed.mean(torch.arange(len(results.domains))):.2f}, "
                             f"{bootstrap.difference(changed, usual)}")  # fmt: skip
            rows.append([name, *cells])
        title = f"weaver, {main} nodes, one setting changed: accepted a step, and its difference to the defaults"
        tables.append(Table(title, ["", *(c.name for c in results.columns)], rows))

    for name, depths in results.depths.items():
        tables.append(depth_table(name, depths))
    return tables


def depth_table(name: str, counts: dict[str, Tensor]) -> Table:
    """Coverage of the pools and accuracy of first choices, by depth."""

    def share(part: str, whole: str) -> list[str]:
        pairs = zip(counts[part].tolist(), counts[whole].tolist(), strict=True)
        return [f"{100 * p / w:.0f}" if w else "" for p, w in pairs]

    rows = [[f"in the best {pool}", *share(f"pool {pool}", "tokens")] for pool in POOLS]
    for group in ("spine", "sibling"):
        rows.append([f"{group}: tokens", *(str(n) for n in counts[group].tolist())])
        rows += [
            [f"{group}: {who} right", *share(f"{group} {who}", group)] for who in ("marginals", "adapter", "target")
        ]
    header = ["", *(str(d + 1) for d in range(len(counts["tokens"])))]
    return Table(f"{name}: by depth, in percent of the texts' tokens there", header, rows)


def survival(runs: Sequence[Sequence[int]], depths: int) -> list[float]:
    """Share of the steps that accepted at least 1..D drafted tokens."""
    steps = [run for row in runs for run in row]
    return [sum(run > depth for run in steps) / max(len(steps), 1) for depth in range(1, depths + 1)]


def draw(results: Results, budgets: Sequence[int], main: int, path: Path) -> None:
    """Acceptance by budget, and by depth what trees hold, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    bootstrap = Bootstrap(results.domains)
    figure, axes = plt.subplots(2, 4, figsize=(17, 8), layout="constrained")
    for axis, column in zip(axes[0], results.columns, strict=True):
        for number, builder in enumerate(b for b in BUILDER_ROWS if can_run(b, column.rule)):
            runs = [results.runs[column.name, Setting(builder, n, column.rule)] for n in budgets]
            means = [bootstrap.mean(Counts.of(x)) for x in runs]
            colour = f"C{number + (column.rule == 'coupled')}"
            axis.plot(budgets, [m.value for m in means], "--" if builder == ORACLE else "-", c=colour, marker="o",
                      ms=3, label=builder)  # fmt: skip
            axis.fill_between(budgets, [m.low for m in means], [m.high for m in means], color=colour, alpha=0.12, lw=0)
        axis.set(title=column.name, xlabel="drafted nodes", xscale="log")
        axis.set_xticks(budgets, map(str, budgets), minor=False)
        axis.set_xticks([], minor=True)
    axes[0, 0].set_ylabel("accepted drafted tokens a step")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False)

    column = results.columns[0]
    depth_count = len(results.depths[column.name]["tokens"])
    depth = range(1, depth_count + 1)
    for builder in (b for b in BUILDER_ROWS if can_run(b, column.rule)):
        runs = results.runs[column.name, Setting(builder, main, column.rule)]
        axes[1, 0].plot(depth, survival(runs, depth_count), "--" if builder == ORACLE else "-", label=builder)
    axes[1, 0].set(title=f"{column.name}, {main} nodes", ylabel="share of steps that accept this depth")
    for axis, name in zip(axes[1, 1:], results.depths, strict=True):
        counts = results.depths[name]
        for pool in POOLS:
            axis.plot(depth, shares(counts, f"pool {pool}", "tokens"), ":", c="grey", alpha=0.3 + pool / 400)
        whose = (("marginals", "C2"), ("adapter", "C4"), ("target", "C5"))
        for who, colour in whose if name == column.name else whose[:2]:  # greedy text is the target's first choice
            for group, style in (("spine", "-"), ("sibling", "--")):
                line = shares(counts, f"{group} {who}", group)
                axis.plot(depth, line, style, c=colour, label=f"{who}, {group}")
        axis.set(title=f"{name}: first choice right", ylim=(0, 1))
    axes[1, 1].set_ylabel(f"dotted: in the pool of {', '.join(map(str, POOLS))}")
    figure.legend(*axes[1, -1].get_legend_handles_labels(), loc="outside right lower", frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("depth")
    figure.savefig(path, dpi=80)


def shares(counts: dict[str, Tensor], part: str, whole: str) -> Tensor:
    """By depth; NaN, which is not drawn, of fewer than 20 tokens."""
    return torch.where(counts[whole] >= 20, counts[part] / counts[whole], torch.nan)


def as_json(results: Results, tables: Sequence[Table], about: dict[str, Any]) -> dict[str, Any]:
    rows = [{"column": c, "setting": asdict(s), "runs": runs} for (c, s), runs in results.runs.items()]
    depths = {name: {k: v.tolist() for k, v in counts.items()} for name, counts in results.depths.items()}
    return {**about, "domains": results.domains, "tables": [asdict(t) for t in tables], "depths": depths, "runs": rows}


def from_json(paths: Sequence[Path]) -> tuple[Results, dict[str, Any]]:
    """The parts of one study, which must have been run with the same settings, and what they say about themselves.

    Raises:
        ValueError: names the file that does not fit the first.
    """
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    about = {name: parts[0][name] for name in ("environment", "settings")}
    about |= {name: sum(part[name] for part in parts) for name in ("seconds", "replayed", "different")}
    results = Results([], columns_at(about["settings"]["temperature"]))
    for path, part in zip(paths, parts, strict=True):
        if part["settings"] != about["settings"]:
            raise ValueError(f"Found {part['settings']} in {path}; expected those of {paths[0]}, {about['settings']}.")
        results.domains += part["domains"]
        for row in part["runs"]:
            results.runs.setdefault((row["column"], Setting(**row["setting"])), []).extend(row["runs"])
        for name, counts in part["depths"].items():
            results.add_depths(name, {key: torch.tensor(count) for key, count in counts.items()})
    return results, about


def main(
    prompts: Annotated[int, typer.Option(help="Prompts a domain.")] = 30,
    skip: Annotated[int, typer.Option(help="Leave out the first prompts of each domain.")] = 0,
    tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 256,
    budget: Annotated[
        list[int] | None, typer.Option(help="Drafted nodes a step; repeat it. [7, 15, 31, 63, 127]")
    ] = None,
    domain: Annotated[list[str] | None, typer.Option(help="Domains of the prompts; repeat it. [all]")] = None,
    temperature: Annotated[float, typer.Option(help="Of the sampled texts.", min=0.01)] = 1.0,
    ablations: Annotated[bool, typer.Option(help="Change pool, rounds and children one at a time.")] = True,
    weaver: Annotated[str | None, typer.Option(help="Another Weaver with an adapter for the embedded target.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Of torch.")] = None,
    seed: int = 0,
    read: Annotated[list[Path] | None, typer.Option(help="Run nothing, report what `--json` wrote; repeat it.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all counts here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw a picture here (needs matplotlib).")] = None,
) -> None:
    """Accepted drafted tokens a step, by builder, budget, rule and domain, beside the oracle."""
    transformers.logging.set_verbosity_error()
    if read:
        results, about = from_json(read)
    else:
        if threads:
            torch.set_num_threads(threads)
        budgets = sorted(set(budget or (7, 15, 31, 63, 127)))
        settings = {"tokens": tokens, "budgets": budgets, "temperature": temperature, "ablations": ablations}
        start = perf_counter()
        model, tokenizer, own = load_tiny()
        model.to(device)
        if weaver is not None:
            own.detach()
            own = WeaverModel.from_pretrained(weaver)
        own.attach(model)
        results = run_study(
            model, tokenizer, own, prompts_of(domain or DOMAINS, prompts, skip),
            budgets=budgets, new_tokens=tokens, temperature=temperature,
            ablations=main_of(budgets) if ablations else None, skip=skip, seed=seed,
            progress=lambda parts: track(parts, "domains", console=Console(stderr=True)),
        )  # fmt: skip
        about = {
            "environment": environment(model),
            "settings": {**settings, "seed": seed, "weaver": weaver},
            "seconds": perf_counter() - start,
            "replayed": results.replayed,
            "different": results.different,
        }
    budgets = about["settings"]["budgets"]
    tables = tables_of(results, budgets, main_of(budgets), about["settings"]["ablations"], seed)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # nobody's window to fit
    for table in tables:
        console.print(table.rich(), "")
    equal = about["replayed"] - about["different"]
    note = f"The replay gave the runs of `generate` itself on {equal} of {about['replayed']} texts."
    console.print(note)
    if markdown:
        text = "\n\n".join([*(table.markdown() for table in tables), note, f"`{json.dumps(about)}`"])
        markdown.write_text(text + "\n", encoding="utf-8")
    if json_path:
        json_path.write_text(json.dumps(as_json(results, tables, about)), encoding="utf-8")
    if figure:
        draw(results, budgets, main_of(budgets), figure)


def prompts_of(domains: Sequence[str], count: int, skip: int) -> list[Prompt]:
    """Prompts `skip..skip + count - 1` of each domain."""
    return [prompt for domain in domains for prompt in load_prompts([domain], skip + count)[skip:]]


def main_of(budgets: Sequence[int]) -> int:
    """The budget that is shown where one alone is."""
    return 63 if 63 in budgets else max(budgets)


if __name__ == "__main__":
    typer.run(main)
