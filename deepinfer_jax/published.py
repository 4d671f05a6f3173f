"""What the published engine sets by environment variables, and what each is here.

Nothing here is read by the engine: it is a table for people who come from there, shown by
`deepinfer-jax env`. Every name in `Setting.fields` exists (tests/test_published.py looks them up):

    requests.Options.min_p          an attribute below deepinfer_jax
    loading.load(weights)           an argument of a function there
    deepinfer-jax generate --seed   an option of the command, or a command without one
    $JAX_COMPILATION_CACHE_DIR      a variable that JAX reads itself
    jax.profiler.trace              a function of JAX
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

PREFIX = "DEEPINFER_"
Answer = Literal["field", "not needed", "not yet"]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One variable of the published engine.

    Attributes:
      name: without the prefix `DEEPINFER_`.
      default: there, as text; empty where there is none.
      meaning: what it sets there.
      answer: whether there is something to write instead, nothing is needed, or it is missing.
      here: what to write, or why not.
      fields: the names that hold it, in the forms above; none unless the answer is "field".
    """

    name: str
    default: str
    meaning: str
    answer: Answer
    here: str
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.answer not in get_args(Answer):
            raise ValueError(f"answer must be one of {get_args(Answer)}, got {self.answer!r}")
        if (self.answer == "field") != bool(self.fields):
            raise ValueError(f"{self.name}: fields go with the answer 'field' and with no other")

    @property
    def variable(self) -> str:
        """The whole name."""
        return PREFIX + self.name


def find(names: Iterable[str]) -> list[Setting]:
    """The settings of these names, with or without prefix, in any case; all where none is given.

    Raises ValueError for a name that is none, with the nearest ones.
    """
    wanted = [name.upper().removeprefix(PREFIX) for name in names]
    known = {setting.name: setting for setting in SETTINGS}
    for name in wanted:
        if name not in known:
            parts = {part for part in name.split("_") if len(part) > 2}
            near = [other for other in known if parts & set(other.split("_"))]
            said = f"near it are {', '.join(near[:5])}" if near else "see the whole table"
            raise ValueError(f"the published engine has no variable {PREFIX}{name}; {said}")
    return [known[name] for name in wanted] or list(SETTINGS)


def are_set(environment: Mapping[str, str]) -> Iterator[tuple[str, str, Setting | None]]:
    """(variable, value, setting) of every `DEEPINFER_` variable there; None for an unknown one."""
    known = {setting.variable: setting for setting in SETTINGS}
    for variable in sorted(environment):
        if variable.startswith(PREFIX):
            yield variable, environment[variable], known.get(variable)


def _field(name: str, default: str, meaning: str, here: str, *fields: str) -> Setting:
    return Setting(name, default, meaning, "field", here, fields)


def _needless(name: str, default: str, meaning: str, why: str) -> Setting:
    return Setting(name, default, meaning, "not needed", f"because {why}")


def _missing(name: str, default: str, meaning: str, state: str) -> Setting:
    return Setting(name, default, meaning, "not yet", state)


_SIZES = "the engine compiles few programs of fixed sizes (`engine.sizes`)"
_ONE_TOWER = "pictures are encoded by the process that shows them, when their rows are about to run"
_XLA_MOVES = "XLA moves data between devices and chooses how"
_MIXED = "prompts and decoding share a step, so no phase has to be chosen"
_JAX_PROFILES = "write what to trace around `generate`, from Python"
_ONE_PROCESS = "scheduler and device are one process without a queue between them"
_NO_SWITCH = "no switch changes what a model computes"

SETTINGS: tuple[Setting, ...] = (
    # -- run time
    _field("ACCELERATOR", "nvidia", "kind of device", "JAX finds the device; this picks another",
           "$JAX_PLATFORMS", "numerics.Numerics.rows"),
    _field("JIT_CACHE_DIR", "", "folder of compiled kernels",
           "the command keeps programs in the user's cache folder by itself",
           "$JAX_COMPILATION_CACHE_DIR"),
    _needless("NCCL_NUM_SMS", "32", "processors set aside for collectives", _XLA_MOVES),
    _needless("USERBUFFER_COMM_SMS", "0: automatic", "processors for the exchange of experts",
              _XLA_MOVES),
    _needless("GLOO_TIMEOUT", "14400 s", "patience of collectives between hosts",
              "processes that wait for one that has died end within seconds"),
    _needless("GC_INTERVAL_STEP", "1000", "steps between garbage collections",
              "Python's own collector is left to itself"),
    _needless("ENFORCE_EAGER", "0", "run without captured graphs",
              "operations one by one have other bits: `load` refuses jax_disable_jit"),
    _needless("DFLASH_ENFORCE_EAGER", "0", "the same for the drafter",
              "operations one by one have other bits: `load` refuses jax_disable_jit"),
    _needless("CUDAGRAPH_BATCH_SIZE_INTERVAL", "8", "distance of captured batch sizes", _SIZES),
    _needless("DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL", "8", "the same for the drafter", _SIZES),
    _field("BATCH_INVARIANT", "0", "results that do not depend on the batch",
           'always on, and tried by the command; rows="batched" gives it up',
           "numerics.Numerics.rows", "loading.load(numerics)", "deepinfer-jax check-determinism"),
    _needless("DISABLE_SYNC_GUARD", "0", "no search for hidden waits of the host",
              "the engine reads results in one place, a step behind the device"),
    # -- experts
    _field("OVERRIDE_NUM_EXTRA_EXPERTS", "0", "fewest copies of experts",
           "over a mesh; the command's --extra-experts",
           "layout.initial_placements(least)"),
    _field("EXPERT_COUNT_WINDOW_SIZE", "100", "steps of the statistics of experts",
           "calls of the devices; the command takes those since the last rearrangement",
           "engine.balance.Balancing.window"),
    _field("EXPERT_REARRANGEMENT_STEP_INTERVAL", "0: off", "decode steps between moves",
           "calls of the devices, prompts among them; the command's --rearrange-every",
           "engine.balance.Balancing.interval"),
    _needless("REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE", "0", "moves after prompts, too",
              "calls with prompts count like all others"),
    _needless("REARRANGE_P2P_GROUPS", "1", "batches of a move",
              "a layer moves in rounds of one expert for each pair of devices"),
    _needless("SHOW_EPLB_DETAIL", "0", "log every move",
              "`engine.Statistics.moved_layers` counts them, and `engine.StepRecord.moe_lb` "
              "shows what they bring"),
    _field("MOE_LB_STAT_INTERVAL", "128", "steps of the measure of balance",
           "of every call, and drawn by `plots.metrics`",
           "engine.StepRecord.moe_lb"),
    _needless("FORCE_IMBALANCE_RATIO", "0", "skewed routing, for tests", _NO_SWITCH),
    _needless("FORCE_LOAD_BALANCE", "0", "even routing, for tests", _NO_SWITCH),
    # -- prompts and scheduling
    _needless("PREFILL_MAX_SUM_SEQLEN_K", "2^30", "most keys in a prompt step",
              "a step has few prompt rows, however many keys they see (`engine.sizes`)"),
    _field("INDEX_ATTN_MEMORY_LIMIT", "10 GiB", "memory for scores of the index",
           "scores are made for so many keys at a time; part of the numerics",
           "numerics.Numerics.index_block"),
    _needless("PREFILL_ATTEMPT_INTERVAL", "70", "steps until prompts are tried", _MIXED),
    _needless("PREFILL_ANY_ATTEMPT_INTERVAL", "100", "the same where any rank wants to", _MIXED),
    _needless("ZERO_OVERHEAD_SCHEDULING", "0; 1 by its arguments", "plan a step before the last "
              "one is read", "the engine is always a step ahead"),
    _field("NUM_STATE_SLOTS_RATIO", "1.2", "slots of state for a request",
           "states kept for prompts that begin alike", "engine.Sizes.snapshots"),
    _field("PREFILL_STORE_EXTRA_STATE", "0", "keep states near the end of prompts",
           "states kept for prompts that begin alike", "engine.Sizes.snapshots"),
    _field("PREFILL_STORE_EXTRA_STATE_SIZE", "128", "how many", "the same",
           "engine.Sizes.snapshots"),
    _field("YOCO_PREFILL_TRUNCATION_MODE", "off", "prompts that stop at the decoder",
           "of the transition `prefill`; `generate` runs whole prompts",
           "model.forward.Replay.mode", "steps.prefill(replay)"),
    _field("YOCO_PREFILL_KEEP_TOKENS", "0", "tokens at a prompt's end that do not stop",
           "of the transition `prefill`", "model.forward.Replay.keep"),
    # -- drafts
    _field("USE_NEXTN_DECODE", "5", "drafts of a round",
           "default none; changes no bit here",
           "planning.policies.Fixed.count", "generation.generate(speculative)",
           "llm.LLM(speculative)", "deepinfer-jax generate --speculative"),
    _field("ENABLE_MTP_VARLEN", "0", "verify as many drafts as pay",
           "by confidence, or planned by measured times",
           "planning.policies.Threshold.tau", "planning.policies.Planner.table",
           "deepinfer-jax generate --speculative"),
    _field("MAX_BACKTRACKING_TOKENS", "drafts + 1", "room in rings for rejected drafts",
           "derived from the model", "cache.init_cache(slack)"),
    _field("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1.0", "calibration of the drafter's confidence",
           "read from the model's folder", "loading.Model.confidence_temperatures",
           "planning.policies.Threshold.temperatures", "planning.policies.Planner.temperatures"),
    _field("DECODE_PERF_CACHE_DIR", "", "folder of measured step times",
           "measured once by the command, then named", "deepinfer-jax profile --out",
           "deepinfer-jax generate --speculative"),
    _needless("DECODE_PERF_CACHE_TTL_SEC", "3600", "age at which they are measured again",
              "a table belongs to a model, device and numerics, and is refused for others"),
    # -- sampling
    _needless("SAMPLER_FORCE_TOPK", "0", "cut all logits to so many",
              "truncation works on the whole vocabulary without sorting it; top_k cuts a request"),
    _field("DECODE_TOKEN_BLACKLIST", "", "tokens never said, by the process",
           "by request", "requests.Options.banned_token_ids",
           "llm.SamplingParams.banned_token_ids"),
    _missing("COMPUTE_SUM_SMALLER_PROBS", "0", "mass of tokens less probable than the chosen one",
             "`Result.kept_mass` has the mass that truncation left"),
    _needless("FUSED_SAMPLE_STRESS_TEST", "0", "a test of its sampler",
              "the tests of this one are in tests/test_sampling.py"),
    _needless("FUSED_SAMPLE_DETAIL_LOG", "0", "a log of its sampler",
              "a result has every number of every token"),
    # -- structured output
    _needless("XGRAMMAR_DEBUG", "0", "log of the grammar compiler",
              "a grammar that fails says why, in the error of its request"),
    _field("XGRAMMAR_TIMEOUT", "20 s", "most time to compile a grammar",
           "of a Compiler; the engine's has the defaults", "grammar.GrammarSettings.timeout_s"),
    _field("XGRAMMAR_DISABLE_CACHE", "0", "compile every time", "0 entries",
           "grammar.GrammarSettings.cache_entries"),
    _field("XGRAMMAR_CACHE_LIMIT_BYTES", "10 GiB", "most memory of compiled grammars",
           "counted in entries", "grammar.GrammarSettings.cache_entries"),
    _field("SO_BUILDER_CPUS", "4", "processors that compile grammars", "threads",
           "grammar.GrammarSettings.workers"),
    # -- memory tables, images
    _field("ENGRAM_PAD_TOKEN", "2", "token before the start, for n-grams",
           "of the checkpoint", "config.ModelConfig.engram_pad_token_id"),
    _needless("ENGRAM_FORCE_GPU_STORAGE", "0", "keep the memory tables on the device",
              "all weights are on the device"),
    _needless("USE_MULTIMODAL_POOL", "0; 1 by its arguments", "share encoded images",
              "an image that is shown again is encoded once, as long as it is kept"),
    _field("MULTIMODAL_POOL_SIZE_GB", "8", "its size", "in bytes, of the host; 256 MiB by default",
           "engine.Sizes.picture_bytes"),
    _needless("MULTI_MODAL_BUFFER_SIZE", "512", "images on their way", _ONE_TOWER),
    _needless("MULTI_MODAL_WORKER_TIMEOUT", "1800 s", "patience with the encoder", _ONE_TOWER),
    # -- logs and profiles
    _field("LOGGING_INTERVAL_STEP", "100", "steps between lines of the log",
           "a line of JSON for every step", "deepinfer-jax generate --metrics"),
    _needless("NCCL_MEMORY_SAMPLE_INTERVAL_STEPS", "1000", "steps between samples of memory",
              "memory is planned before anything is allocated (`engine.memory`)"),
    _needless("RINGBUFFER_WARNING_INTERVAL", "60 s", "warnings of a full queue", _ONE_PROCESS),
    _needless("CPP_LOG_LEVEL", "info", "log of its native part", "there is no native part"),
    _field("PROFILE_TORCH_CUDA_MEMORY", "0", "record allocations", "a snapshot of device memory",
           "jax.profiler.save_device_memory_profile"),
    _field("ENABLE_MEMORY_TRACING", "0", "trace memory", "a snapshot of device memory",
           "jax.profiler.save_device_memory_profile"),
    _field("TORCH_PROFILER_DIR", "system's", "folder of traces", _JAX_PROFILES,
           "jax.profiler.trace"),
    _field("PROFILE_HTTP_ENABLE", "0", "trace by request over HTTP", "for TensorBoard or Perfetto",
           "jax.profiler.start_server"),
    _field("PROFILE_HTTP_PORT_BASE", "6070", "first port of it", "its argument",
           "jax.profiler.start_server"),
    _field("HF_MODEL_DIR", "", "folder of the model, in examples", "the first argument",
           "loading.load(model)", "llm.LLM(model)", "deepinfer-jax generate --model"),
)  # fmt: skip
