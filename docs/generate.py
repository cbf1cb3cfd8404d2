"""Writes the pages that follow from the code (flags.md, metrics.md, errors.md, layers.md, admin.md, the rules of
compatibility.md, the families of models.md), and the types of ``baton.Engine``'s methods.

``python docs/generate.py`` rewrites them (``make docs`` runs it); ``--check`` only compares, and exits with 1 where one
is out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from baton.common.api.messages import State
from baton.common.bench.deterministic_args import DeterministicArgs
from baton.common.bench.draft_args import BenchDraft
from baton.common.bench.eval_args import BenchEval
from baton.common.bench.load_args import BenchLoad
from baton.common.bench.offline_args import BenchOffline
from baton.common.bench.one_batch_args import BenchOneBatch
from baton.common.bench.one_batch_server_args import BenchOneBatchServer
from baton.common.bench.serving_args import BenchServing
from baton.common.calibration.channel_args import CalibrateDoubleSparsity
from baton.common.commands.base import Endpoint
from baton.common.commands.methods import signature_of
from baton.common.commands.registry import own_endpoints
from baton.common.config.cli import _Flag, _flags, _shape
from baton.common.config.foreign_flags import Automatic, Foreign, Mapped, Refused
from baton.common.config.roles import ROLES
from baton.common.config.rules import rules_of
from baton.common.config.server import ObserveArgs, ServerConfig
from baton.common.config.server.sglang_flags import SGLANG_FLAGS
from baton.common.models.registry import MODELS
from baton.common.obs.buckets import Buckets
from baton.common.obs.engine_metrics import COUNTERS, GAUGES
from baton.common.obs.metrics import ServerMetrics
from baton.common.obs.sglang_aliases import SGLANG_NAMES
from baton.common.serving.protocol.unsupported_fields import NO_EFFECT
from baton.kvtransfer.bench.args import BenchArgs
from baton.launch import ClusterConfig
from baton.router.config import RouterConfig
from baton.router.obs.metrics import Metrics
from baton.router.workers.registry import Registry
from baton.simulate.args import Simulate
from baton.simulate.calibrate.args import Calibrate
from baton.simulate.plan.args import Plan
from baton.tests.helpers import layers, request_fields

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by docs/generate.py from the code: change it there, then run `make docs`. -->"


# ---------------------------------------------------------------------- flags


class Command(NamedTuple):
    name: str
    config: type
    text: str


COMMANDS = (
    Command("launch_server", ServerConfig, "A unified, prefill or decode server. `launch_prefill` and `launch_decode` "
            "take the same flags, with `--disaggregation-mode` set."),
    Command("launch_router", RouterConfig, "The router. What policies, admission and retries do: [router](router.md)."),
    Command("launch_cluster", ClusterConfig, "Router and servers on this host. Flags of `launch_server` go to the "
            "servers, flags that begin with `--router-` to the router (`--router-policy`, ...); `--model-path` is "
            "`tinychat` and `--disaggregation-transfer-backend` is `auto` by default."),
    Command("bench_serving", BenchServing, "A load on any server: [benchmarks](benchmarks.md)."),
    Command("bench_one_batch", BenchOneBatch, "Prefill and decode steps of one batch, without a server."),
    Command("bench_one_batch_server", BenchOneBatchServer, "Batches sent at once to a server, which it starts with the "
            "flags of `launch_server` or finds at `--base-url`."),
    Command("bench_offline_throughput", BenchOffline, "`baton.Engine` over a data set."),
    Command("bench_load", BenchLoad, "How long a checkpoint's weights take to load, by phase."),
    Command("bench_deterministic", DeterministicArgs, "Whether a server's answers depend on what it computes beside "
            "them: [deterministic inference](deterministic.md)."),
    Command("bench_eval", BenchEval, "The share of right answers to MMLU, GSM8K or HellaSwag: "
            "[benchmarks](benchmarks.md#accuracy)."),
    Command("bench_draft_acceptance", BenchDraft, "How many draft tokens a model's MTP layers would get accepted."),
    Command("calibrate_double_sparsity", CalibrateDoubleSparsity, "The heavy channels of a model's heads, from a text: "
            "[sparse attention](sparse-attention.md). `python -m baton.calibrate_double_sparsity` is the same."),
    Command("baton_simulate", Simulate, "A cluster under a workload, on a virtual clock: [simulator](simulator.md)."),
    Command("baton_plan", Plan, "The cheapest cluster for a workload and an objective: "
            "[simulator](simulator.md#plan)."),
    Command("bench_calibrate", Calibrate, "A running server's cost table for `baton_simulate`: "
            "[simulator](simulator.md#calibrate)."),
    Command("bench_kvtransfer", BenchArgs, "KV transfers between processes: [KV transfer](transfer.md#measure)."),
)


def flags_page() -> str:
    lines = ["# Flags", "", NOTE, "",
             "Every command prints these with `--help` and reads the same names from `--config file.yaml`; flags win "
             "over the file. A flag that is on by default is turned off by its `--no-` form. Lists take several "
             "values: `--cuda-graph-bs 1 2 4`.", ""]
    server = sections(ServerConfig)
    for command in COMMANDS:
        lines += [f"## {command.name}", "", command.text, ""]
        own = sections(command.config)
        shared = [section for section, flags in own.items() if command.config is not ServerConfig
                  and {flag.field for flag in flags} <= {flag.field for flag in server.get(section, ())}]
        for section, flags in own.items():
            if section in shared:
                continue
            if section:
                lines += [f"### {command.name}: {section}", ""]
            lines += ["| flag | values | default | meaning |", "|---|---|---|---|"]
            lines += [*map(flag_row, flags), ""]
        if shared:
            links = ", ".join(f"[{section}](#{anchor(f'launch_server: {section}')})" for section in shared)
            without = [f"--{flag.key.replace('_', '-')}" for section in shared for flag in server[section]
                       if flag.key not in {item.key for flags in own.values() for item in flags}]
            left_out = f", without {code(without)}" if without else ""
            lines += [f"It also takes these sections of [launch_server](#launch_server): {links}{left_out}.", ""]
    return "\n".join(lines)


def sections(config: type) -> dict[str, list[_Flag]]:
    """The flags of a command by the part of its configuration."""
    found: dict[str, list[_Flag]] = {}
    for flag in _flags(config):
        found.setdefault(flag.section, []).append(flag)
    return found


def flag_row(flag: _Flag) -> str:
    names = [f"--{flag.key.replace('_', '-')}", *flag.field.metadata["names"]]
    if flag.field.default is True:
        names.insert(1, f"--no-{names[0][2:]}")
    return row(code(names), values(flag), default(flag.field.default), flag.field.metadata["help"])


def values(flag: _Flag) -> str:
    kind, _, many = _shape(flag.annotation)
    text = code(flag.choices) if flag.choices else {bool: "", str: "text"}.get(kind, kind.__name__)
    return f"list of {text}" if many and not flag.field.metadata["repeat"] else text


def default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value is False or value == ():
        return ""
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return code([" ".join(map(str, value))])
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def anchor(title: str) -> str:
    """The fragment that GitHub and mkdocs give to a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


# ---------------------------------------------------------------------- flags of SGLang's servers


def sglang_names() -> dict[str, str]:
    """SGLang's server flags and aliases, and what becomes of each here."""
    lines = (ROOT / "tests/common/config/sglang_flags.txt").read_text().splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def sglang_page() -> str:
    names = sglang_names()
    lines = [*sglang_introduction(names), "",
             "## Flags of Baton", "",
             "They have SGLang's meaning; [flags](flags.md) describes them.", "",
             code(name for name, outcome in names.items() if outcome == "ours"), "",
             "## Other flags here", "", "| flag | here |", "|---|---|"]
    lines += [row(code([name]), marked(flag.becomes)) for name, flag in of_outcome(Mapped)]
    lines += ["", "Values that are others here:", "", "| flag | value | here |", "|---|---|---|"]
    lines += [row(code([name]), code([theirs]), code([ours])) for name, values in SGLANG_FLAGS.values.items()
              for theirs, ours in values.to.items()]
    lines += ["", "## Not needed", "", "| flags | because |", "|---|---|", *by_reason(Automatic)]
    lines += ["", "## Refused", "", "| flags | because |", "|---|---|", *by_reason(Refused)]
    lines += ["", "Values that are refused:", "", "| flag | values | because |", "|---|---|---|"]
    for name, values in SGLANG_FLAGS.values.items():
        for reason in dict.fromkeys(values.refused.values()):
            refused = [value for value, each in values.refused.items() if each == reason]
            lines.append(row(code([name]), code(refused), marked(reason)))
    return "\n".join([*lines, ""])


def sglang_introduction(names: dict[str, str]) -> list[str]:
    return ["# SGLang's server flags", "", NOTE, "",
            "`launch_server`, `launch_prefill`, `launch_decode`, `launch_cluster`, `python -m baton.launch_server` "
            "and `baton.Engine` take SGLang's flags: every one of 0.5.2 and 0.5.23 works, or ends in a sentence that "
            "says why not. Names may have dashes or underscores and be abbreviated, on the command line and in "
            "`--config` files (YAML or JSON; `true` gives a flag, `false` and `null` leave it out). Flags that are "
            "not needed and those that are others here are reported by a line on stderr. `--help` lists ours.", "",
            f"Of {len(names)} names, " + ", ".join(
                f"{sum(outcome == each for outcome in names.values())} are {text}" for each, text in (
                    ("ours", "flags of Baton"), ("mapped", "other flags here"), ("automatic", "not needed"),
                    ("refused", "refused"))) + ".", "",
            "`--dp-size N` without `--enable-dp-attention` starts N whole servers behind a router, at the address "
            "that the server would have had."]


def of_outcome(kind: type) -> Iterator[tuple[str, Any]]:
    return ((name, flag) for name, flag in SGLANG_FLAGS.flags.items() if isinstance(flag, kind))


def by_reason(kind: type[Foreign]) -> Iterator[str]:
    """A row for each reason, with the flags that have it; values with which a refused flag is taken follow it."""
    reasons: dict[str, list[str]] = {}
    for name, flag in of_outcome(kind):
        harmless = " or ".join(f"`{value}`" for value in getattr(flag, "harmless", ()) if value)
        reasons.setdefault(flag.reason, []).append(f"`{name}`" + (f" (but {harmless})" if harmless else ""))
    return (row(", ".join(flags), marked(reason)) for reason, flags in reasons.items())


def marked(text: str) -> str:
    """Prose with its flags and paths as code."""
    return re.sub(r"(?<![\w`])(--?[a-z][\w-]+|/[a-z]\w*(?:/[a-z]\w*)*)", r"`\1`", text)


# ---------------------------------------------------------------------- fields of requests


def fields_page() -> str:
    lines = ["# Fields of requests", "", NOTE, "",
             "The fields that SGLang (0.5.2 and 0.5.23), OpenAI's and Anthropic's clients send. Those that work have "
             "their meaning there. Those that are refused get a 400 that names them where they ask for something: "
             "null, false, empty values and those in parentheses ask for nothing. Those that are ignored change no "
             "answer, for the reason that is stated last. Fields of other names are ignored.", ""]
    for body, outcomes in request_fields.listed().items():
        title, _, table = request_fields.BODIES[body]
        lines += [f"## {title}", ""]
        for outcome in ("works", "ignored"):
            if names := [name for name, each in outcomes.items() if each == outcome]:
                lines += [f"{outcome.capitalize()}: {code(names)}.", ""]
        if refused := [name for name, each in outcomes.items() if each == "refused"]:
            lines += ["| refused | instead |", "|---|---|"]
            by_alternative: dict[str, list[str]] = {}
            for name in refused:
                harmless = ", ".join(f"`{value}`" for value in table[name].harmless)
                by_alternative.setdefault(table[name].instead, []).append(
                    f"`{name}`" + (f" ({harmless})" if harmless else ""))
            lines += [*(row(", ".join(names), marked(text)) for text, names in by_alternative.items()), ""]
    lines += ["## Why fields are ignored", "", "| fields | because |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for name, reason in NO_EFFECT.items():
        reasons.setdefault(reason, []).append(name)
    lines += [row(code(names), reason) for reason, names in reasons.items()]
    return "\n".join([*lines, ""])


# ---------------------------------------------------------------------- metrics


def metrics_page() -> str:
    lines = ["# Metrics", "", NOTE, "",
             "Every process answers `GET /metrics` in Prometheus's text format. How to scrape them, and the dashboard: "
             "[observability](observability.md#metrics). Each process also exports `process_*`, `python_gc_*` and "
             "`baton_build_info` (versions as labels).", "", "## Servers", "",
             "All have the labels `model_name` and `mode` (`null` for a unified server, `prefill`, `decode`). Counters "
             "are there from the start; the engine's gauges appear once weights are loaded. Those of `spec_` are there "
             "with `--speculative-algorithm`, those of `tier_`, `prefetch` and `storage_` with "
             "`--enable-hierarchical-cache`, the histograms of tokens with `--collect-tokens-histogram`, and with "
             "`--speculative-simulate-acceptance` all metrics have the label "
             "`simulated=\"true\"`.", "",
             "| metric | type | servers | further labels | meaning | SGLang's name |", "|---|---|---|---|---|---|"]
    lines += server_rows()
    lines += ["", "## Router", "", "| metric | type | labels | meaning |", "|---|---|---|---|", *router_rows(), ""]
    return "\n".join(lines)


def server_rows() -> Iterator[str]:
    found: dict[str, tuple[Any, list[str]]] = {}
    for mode in sorted(ROLES, key=lambda name: (not ROLES.get(name).serves_alone, ROLES.get(name).receives_kv)):
        for family in server_families(mode):
            found.setdefault(family.name, (family, []))[1].append(ROLES.get(mode).label)
    for name, (family, modes) in sorted(found.items(), key=lambda item: (item[1][0].type, item[0])):
        alias = SGLANG_NAMES.get(name)
        yield row(f"`{exported(family)}`", family.type, "all" if len(modes) == len(ROLES.names) else ", ".join(modes),
                  labels(family, {"model_name", "mode", "le"}), sentence(family.documentation),
                  f"`{alias}{'_total' if family.type == 'counter' else ''}`" if alias else "")


def server_families(mode: str) -> Iterable[Any]:
    """The metrics of a server whose engine has reported once."""
    role = ROLES.get(mode)
    metrics = ServerMetrics("m", mode, speculates=role.decodes, tiered=True,
                            buckets=Buckets.of_flags(ObserveArgs(collect_tokens_histogram=True)))
    metrics.count_outcome("stop")
    gauges = {name: 0.0 for name, gauge in GAUGES.items() if gauge.exported_by(role)}
    counters = {name: 0.0 for name, counter in COUNTERS.items() if counter.exported_by(role) and counter.label is None}
    numbers = {name: 0 for name, hint in typing.get_type_hints(State).items() if hint is int}
    metrics.engine.states = [State(**{**numbers, "page_size": 1, "total_pages": 1}, counters=counters, gauges=gauges)]
    return metrics.registry.collect()


def router_rows() -> Iterator[str]:
    for family in sorted(router_families(), key=lambda family: (family.type, family.name)):
        yield row(f"`{exported(family)}`", family.type, labels(family), sentence(family.documentation))


def router_families() -> Iterable[Any]:
    return Metrics(Registry(failure_threshold=1, success_threshold=1)).families()


def labels(family: Any, common: Collection[str] = ()) -> str:
    """The labels of a family that are not ``common``, with the values that are there before anything happens."""
    seen: dict[str, dict[str, None]] = {name: {} for name in getattr(family, "_labelnames", ()) if name not in common}
    for sample in family.samples:
        for name in sample.labels.keys() - set(common):
            seen.setdefault(name, {})[sample.labels[name]] = None
    return "; ".join(f"`{name}`: {code(values)}" if values else f"`{name}`" for name, values in seen.items())


def exported(family: Any) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def code(words: Iterable[Any]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def sentence(text: str) -> str:
    return text.rstrip(".")


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---------------------------------------------------------------------- errors


class Family(NamedTuple):
    """Start-up errors of one kind: those raised by the files below ``folders``."""

    title: str
    advice: str
    folders: tuple[str, ...]


FAMILIES = (
    Family("Flags and files that name them",
           "A value has the wrong type or range, or two flags exclude each other. The sentence names the flag; "
           "[flags](flags.md) lists what each takes.",
           ("common/config/cli.py", "common/config/foreign_flags.py", "common/config/logs.py",
            "common/config/rules.py", "common/config/server", "common/config/tls.py",
            "common/registry.py", "common/commands", "common/runner/tensor_input.py",
            "common/runner/forward_hooks.py", "launch.py",
            "offline.py", "common/serving/offline.py", "common/serving/native",
            "common/serving/tool_servers")),
    Family("Packages and GPUs",
           "Something is not installed, or the host shows no GPU. Install the extras that the sentence names "
           "([install](deployment.md#install)); in a container check that it was given its GPUs.",
           ("common/config/packages.py", "common/runner/preflight.py", "common/engine/rank.py",
            "common/obs/tracing.py")),
    Family("Addresses and ports",
           "Another process has the port, or the address is not this machine's. `ss -ltnp` shows who listens; a "
           "cluster takes the ports after `--port`; `--kv-events-port` and `--dist-init-addr` take the next one too.",
           ("common/config/addresses.py", "common/serving/server.py", "common/serving/host.py", "common/engine_client",
            "common/engine", "common/execution", "router/app.py", "router/multiprocess")),
    Family("Checkpoints",
           "The model's folder is incomplete, of an architecture or form that is not supported ([models](models.md)), "
           "or does not match its config.json.",
           ("common/config/model.py", "common/config/model_config.py", "common/config/draft_model.py",
            "common/config/draft_kind.py",
            "common/config/moe.py", "common/config/mla.py", "common/config/mamba2.py",
            "common/config/rope.py", "common/config/window.py", "common/models",
            "common/config/checkpoint.py", "common/config/hub.py", "common/config/described",
            "common/config/remote.py", "common/config/gguf_file.py", "common/config/gguf_families.py", "common/weights",
            "common/runner/model_weights.py", "common/runner/chosen_experts.py",
            "common/runner/remote_instance.py",
            "common/speculative")),
    Family("Quantization",
           "The checkpoint's scheme is not supported, or its blocks do not fit the ranks "
           "([quantization](quantization.md)).",
           ("common/quantization", "common/config/quantization.py", "common/layers")),
    Family("Tokenizers and chat templates",
           "The tokenizer or template cannot be read ([tools](tools.md#chat-templates)).", ("common/tokenizer",)),
    Family("Attention and sampling backends",
           "The chosen backend does not support this model, type or device. Without the flag the right one is chosen "
           "([compatibility](compatibility.md)).",
           ("common/attention", "common/sampling")),
    Family("Sparse attention",
           "The model has no keys that could be read in part, or the file of channels is another model's: calibrate "
           "this one ([sparse attention](sparse-attention.md#channels)).",
           ("common/kvcache/channel_order.py", "common/calibration", "common/runner/attention_choice.py")),
    Family("Memory",
           "Weights or KV pool do not fit. Lower `--max-total-tokens`, `--mem-fraction-static` or "
           "`--chunked-prefill-size`, or use more GPUs.",
           ("common/runner/kv_sizing.py", "common/runner/model_runner.py", "common/scheduler",
            "common/kvcache/eviction", "common/kvcache/tiers")),
    Family("Parallel layouts", "The sizes do not divide each other or the model ([parallelism](parallelism.md)).",
           ("common/distributed", "common/runner/two_batch_overlap.py", "common/runner/expert_location.py")),
    Family("KV transfer", "The backend does not start or cannot share the KV pool ([backends](transfer.md#backends)).",
           ("kvtransfer/backends", "kvtransfer/endpoint.py", "kvtransfer/bootstrap.py")),
    Family("KV storage", "It does not start, or has no such option (`--hicache-storage-backend-extra-config`).",
           ("common/kvcache/storage", "kvtransfer/pages")),
    Family("Folders that a server writes to", "The folder cannot be made or written; give another one.",
           ("common/serving/storage", "common/serving/context", "common/obs/logging.py",
            "common/runner/tensor_dump.py", "common/runner/cuda_graphs/capture_profile.py")),
    Family("Router",
           "Flags of the router that exclude each other, keys and certificates that cannot be read, or flags of sglang-"
           "router that have no meaning here ([router](router.md)).",
           ("router/config", "router/net", "router/sglang_flags.py", "router/monitoring")),
    Family("Benchmarks", "The load cannot be made or the server does not answer ([benchmarks](benchmarks.md)).",
           ("common/bench", "kvtransfer/bench")),
    Family("Simulations", "The workload, the cluster or the cost table cannot be used ([simulator](simulator.md)).",
           ("simulate",)),
)


def errors_page() -> str:
    lines = ["# Startup errors", "", NOTE, "",
             "A server, router or benchmark that cannot start prints one sentence, without a traceback, and exits with "
             "status 2 (a wrong command line) or 1. The sentence says what to change. Here are all of them by kind; "
             "`…` stands for a value. Problems of a running system: [troubleshooting](troubleshooting.md).", ""]
    sentences = {family.title: [] for family in FAMILIES}
    for path, text in startup_errors():
        sentences[family_of(path).title].append((text, path))
    for family in FAMILIES:
        lines += [f"## {family.title}", "", family.advice, "", "| error | raised in |", "|---|---|"]
        lines += [row(text, f"`{path}`") for text, path in sorted(sentences[family.title])] + [""]
    return "\n".join(lines)


def family_of(path: str) -> Family:
    """Raises LookupError for a file that no family names."""
    for family in FAMILIES:
        if any(path == folder or path.startswith(f"{folder}/") for folder in family.folders):
            return family
    raise LookupError(f"{path} raises ConfigError: name it in a Family of docs/generate.py")


def startup_errors() -> list[tuple[str, str]]:
    """``(file, sentence)`` of every ConfigError that a file of the package raises with a text of its own."""
    found: dict[tuple[str, str], None] = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith(("tests/", "docs/", "examples/", ".", "build/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = text_of(node.args[0]) if raises_config_error(node) else ""
            text = rule_text(node.args[1]) if is_rule(node) else text
            if text.strip("… ."):
                found[name, text] = None
    return list(found)


def is_rule(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Rule"


def rule_text(sentence: ast.expr) -> str:
    """The sentence of a rule on flags, with ``…`` for each value."""
    return escaped(without_values(ast.literal_eval(sentence)))


def without_values(sentence: str) -> str:
    return re.sub(r"{[^}]*}", "…", sentence)


def raises_config_error(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError"


def text_of(node: ast.expr) -> str:
    """A message's text in the code, with ``…`` for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return escaped(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "…"


def escaped(text: str) -> str:
    for char in "\\`*_{}[]<>":
        text = text.replace(char, f"\\{char}")
    return text.replace("\n", " ")


# ---------------------------------------------------------------------- administrative commands


def admin_page() -> str:
    lines = ["# Changing a running server", "", NOTE, "",
             "These change a server as a whole. A router has the same endpoints and sends them to all of its workers; "
             "its answer has each worker's status. [`baton.Engine`](engine.md) has a method for each, named like the "
             "path, with the body's fields as parameters. With `--admin-api-key` they take that key alone.", "",
             "| endpoint | fields of the body | effect |", "|---|---|---|"]
    lines += [row(code(f"{method} {endpoint.path}" for method in endpoint.methods),
                  code(field.name for field in endpoint.parameters), prose_of(endpoint))
              for endpoint in own_endpoints()]
    return "\n".join([*lines, "",
                      "With pairs, other weights change [which servers fit together]"
                      "(transfer.md#which-servers-fit-together). [Weights from a trainer](weights.md) has the order in "
                      "which a trainer sends them.", "",
                      "Of single requests: `POST /abort_request` with `rid`, or with `abort_all` for all of them, ends "
                      "requests; they are answered with the tokens so far, and the finish reason `abort`. "
                      "`POST /open_session` and `POST /close_session` keep a session: `/generate`, "
                      "`/v1/chat/completions` and `/v1/completions` with `session_params` send only what is new, the "
                      "server remembers the rest; a request's `rid` is its name in the session.", "",
                      "[A command of your own](contributing.md#add-an-administrative-command) is one file.", ""])


def prose_of(endpoint: Endpoint) -> str:
    return " ".join(inspect.getdoc(endpoint.serve).split()).replace("``", "`")


def engine_methods() -> str:
    """The stub of common/commands/methods.py, for type checkers."""
    lines = ["# Written by docs/generate.py from the commands' files: change it there, then run `make docs`.", "",
             "from abc import ABC", "from collections.abc import Mapping, Sequence", "from typing import Any, Literal",
             "", "from .base import Endpoint", "", "class CommandMethods(ABC):", "    def __init__(self) -> None: ...",
             "    def _run_endpoint(self, endpoint: Endpoint, arguments: Mapping[str, Any]) -> str: ..."]
    for endpoint in own_endpoints():
        _, *parameters = signature_of(endpoint).parameters.values()
        lines += [f"    def {endpoint.name}(", "        self,",
                  *(f"        {each.name}: {each.annotation}"
                    f"{'' if each.default is each.empty else f' = {each.default!r}'}," for each in parameters),
                  "    ) -> str: ..."]
    return "\n".join([*lines, "", "def signature_of(endpoint: Endpoint) -> Any: ...", ""])


# ---------------------------------------------------------------------- combinations of flags

BEGIN, END = "<!-- Flags that do not combine: written by docs/generate.py from their rules. -->", "<!-- End. -->"


def compatibility_page() -> str:
    """The page with its table of rules made anew; the rest is written by hand."""
    text = (ROOT / "docs" / "compatibility.md").read_text()
    before, after = text[:text.index(BEGIN)], text[text.index(END):]
    lines = [BEGIN, ""]
    for title, config in (("Servers", ServerConfig), ("Router", RouterConfig)):
        hints = typing.get_type_hints(config)
        rules = rules_of({field.name: hints[field.name] for field in dataclasses.fields(config)})
        lines += [f"### {title}", "", "| flags | refused, because |", "|---|---|"]
        lines += [row(code(flags_of(rule.sentence)), escaped(without_values(rule.sentence))) for _, rule in rules]
        lines.append("")
    return before + "\n".join(lines) + after


def flags_of(sentence: str) -> Iterable[str]:
    """The flags that a sentence names, each once."""
    return dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*", sentence))


# ---------------------------------------------------------------------- families of models

FAMILY_TABLE = "<!-- Families: written by docs/generate.py from common/models. -->"


def models_page() -> str:
    """The page with its table of families made anew; the rest is written by hand."""
    text = (ROOT / "docs" / "models.md").read_text()
    start = text.index(FAMILY_TABLE)
    before, after = text[:start], text[text.index(END, start):]
    architectures: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    for name in filter(MODELS.module_of, MODELS):
        family = MODELS.get(name)
        architectures.setdefault(family.title, []).append(name)
        notes[family.title] = family.notes
    lines = [FAMILY_TABLE, "", "| family | `architectures` in `config.json` | what it has |", "|---|---|---|"]
    for title in sorted(architectures, key=str.lower):
        names = architectures[title]
        generating = [name for name in names if not name.endswith(("ForSequenceClassification", "Model"))] or names
        lines.append(row(title, code(generating), notes[title]))
    return before + "\n".join([*lines, "", after])


PAGES: dict[str, Callable[[], str]] = {"models.md": models_page,
                                       "flags.md": flags_page, "sglang-flags.md": sglang_page,
                                       "request-fields.md": fields_page,
                                       "metrics.md": metrics_page, "errors.md": errors_page,
                                       "layers.md": layers.page, "admin.md": admin_page,
                                       "compatibility.md": compatibility_page,
                                       "../common/commands/methods.pyi": engine_methods}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / "docs" / name, page()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale:
        print(f"docs/generate.py: {'out of date' if '--check' in sys.argv else 'written'}: {', '.join(stale)}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
