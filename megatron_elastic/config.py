"""Config: the ``--elastic-*`` flags, in one place for the launcher, the ranks and the docs.

Nothing here imports torch or Megatron, so that bad flags are found before any process starts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_elastic import usage
from megatron_elastic.device.names import NAMES as DEVICES
from megatron_elastic.faults.injection import Injection
from megatron_elastic.layout import PLACEMENTS
from megatron_elastic.observe.tracing.tracer import Window
from megatron_elastic.plan.costs.power import MODES
from megatron_elastic.plan.policies import POLICIES
from megatron_elastic.power.devices import NAMES as ACTUATORS
from megatron_elastic.power.emulated import Emulated

MEASURED = "measured"
"""Value of ``--elastic-profile``: what the ranks measure."""

LONGEST = 1e9
"""Seconds: what waits in the kernel can be told no time without end."""

USAGE = 2
"""Exit code when the flags cannot work."""


class UsageError(Exception):
    """The user's flags cannot work. The message names the flag and the fix; printed without a traceback."""


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """Values of the ``--elastic-*`` flags. Times are in seconds."""

    elastic: bool = False
    run_dir: Path | None = None
    consistency: str = "bitwise"
    dataflow: str = "reroute"
    schedule: str = "1f1b"
    placement: str = "loop"
    slices: int | None = None
    replicas: int = 1
    respawn: bool = False
    spares: int = 0
    verify_every: int = 0
    redo: str = "lost"
    on_error: str = "recover"
    slow: str | None = None
    log_mb: float = 4096.0
    profile: str | None = None
    policy: str = "elastic"
    replay: str = "gradient"
    background_mbps: float = 0.0
    emulate: Path | None = None
    device: str | None = None
    reduction: str = "device"
    dvfs: str | None = None
    actuator: str = "nvidia"
    inject: tuple[Injection, ...] = ()
    start_timeout: float = 180.0
    suspect_timeout: float = 1.0
    heartbeat_timeout: float = 2.5
    hang_timeout: float = 5.0
    report_timeout: float = 60.0
    wait_timeout: float = 300.0
    end_timeout: float = 60.0
    log_format: str = "text"
    metrics_port: int = 0
    trace: str | None = None
    store: str = "auto"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    def __post_init__(self) -> None:
        limits = {
            "start": self.start_timeout,
            "suspect": self.suspect_timeout,
            "heartbeat": self.heartbeat_timeout,
            "hang": self.hang_timeout,
            "report": self.report_timeout,
            "wait": self.wait_timeout,
            "end": self.end_timeout,
        }
        for name, limit in limits.items():
            if not limit > 0:
                raise UsageError(f"--elastic-{name}-timeout must be positive, got {limit:g}")
            if limit > LONGEST:
                raise UsageError(f"--elastic-{name}-timeout must be at most {LONGEST:g} (31 years), got {limit:g}")
        contained = (("suspect", "report"), ("heartbeat", "report"), ("report", "wait"), ("hang", "wait"))
        for inner, outer in contained:
            if limits[inner] >= limits[outer]:
                raise UsageError(
                    f"--elastic-{inner}-timeout ({limits[inner]:g} s) must be below --elastic-{outer}-timeout "
                    f"({limits[outer]:g} s): an outer wait may not end before the one it contains"
                )
        if self.dvfs is not None and self.profile_file is None:
            raise UsageError("--elastic-dvfs needs --elastic-profile FILE, with what units cost and watts of a device "
                             "(power, clock_steps): see docs/planning.md")
        policy = POLICIES[self.policy]
        if policy.refusal is not None:
            raise UsageError(f"--elastic-policy {self.policy} can only be predicted (megatron-elastic plan --policy "
                             f"{self.policy}): {policy.refusal}")
        if policy.schedule is not None and self.schedule not in (policy.schedule, "search"):
            raise UsageError(f"--elastic-policy {self.policy} needs --elastic-schedule {policy.schedule}, got "
                             f"{self.schedule}: it is part of how it works (search, which finds nothing slower, would "
                             "do)")
        if self.schedule == "search" and self.profile is None:
            raise UsageError("--elastic-schedule search needs to know what units cost: add --elastic-profile measured, "
                             "or a profile")
        if self.placement == "search" and self.schedule != "search":
            raise UsageError("--elastic-placement search needs --elastic-schedule search: it places chunks for orders "
                             "of work that are searched")
        if self.slices is not None and self.slices < 1:
            raise UsageError(f"--elastic-slices must be at least 1, got {self.slices}")
        if self.spares < 0:
            raise UsageError(f"--elastic-spares must be 0 (none) or more, got {self.spares}")
        if self.verify_every < 0:
            raise UsageError(f"--elastic-verify-every must be 0 (never) or more, got {self.verify_every}")
        if not 0 <= self.metrics_port < 1 << 16:
            raise UsageError(f"--elastic-metrics-port must be a port, or 0 for none, got {self.metrics_port}")
        if self.trace is not None:
            try:
                Window.parse(self.trace)
            except ValueError as error:
                raise UsageError(f"--elastic-trace: {error}") from None
        if not self.background_mbps >= 0:  # as what is no number is not, either
            raise UsageError(f"--elastic-background-mbps must be 0 or more, got {self.background_mbps:g}")
        if not self.log_mb >= 0:
            raise UsageError(f"--elastic-log-mb must be 0 or more, got {self.log_mb:g}")
        if self.replicas < 0:
            raise UsageError(f"--elastic-replicas must be 0 or more, got {self.replicas}")
        tls = {"cert": self.tls_cert, "key": self.tls_key, "ca": self.tls_ca}
        missing = [f"--elastic-tls-{name}" for name, path in tls.items() if path is None]
        if 0 < len(missing) < len(tls):
            raise UsageError(f"{' and '.join(missing)} must be given as well: a certificate needs its key, and the "
                             "certificate of the authority that signed those of all nodes")

    @property
    def profile_file(self) -> str | None:
        """Where it is written what units cost, if it is."""
        return None if self.profile == MEASURED else self.profile

    @property
    def measures(self) -> bool:
        """Whether ranks tell what their units take: for a profile, or to see how much of it clocks divide."""
        return self.profile == MEASURED or (self.dvfs is not None and self.emulate is None)

    @property
    def cut_off(self) -> float:
        """Seconds without a word from a coordinator that none can follow after which a node ends its ranks.

        Longer than what the coordinator grants an agent: a coordinator that stands still for some seconds does no harm.
        """
        return 4 * self.heartbeat_timeout

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ElasticConfig:
        """Pick the elastic flags out of a parsed namespace (``elastic_*`` attributes)."""
        values = {f.name: getattr(args, "elastic" if f.name == "elastic" else f"elastic_{f.name}") for f in fields(cls)}
        values["inject"] = tuple(values["inject"] or ())
        return cls(**values)


def _injection(text: str) -> Injection:
    try:
        return Injection.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_elastic_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``--elastic-*`` flags as a group of their own."""
    d = ElasticConfig()
    group = parser.add_argument_group("elastic", "train on while ranks are lost (megatron_elastic)")
    group.add_argument("--elastic", action="store_true", help="train elastically; without it the job is plain Megatron")
    group.add_argument("--elastic-run-dir", type=usage.path, metavar="DIR", default=None,
                       help="where logs and records go (default: runs/<time>)")
    group.add_argument("--elastic-consistency", choices=("bitwise", "fast"), default=d.consistency,
                       help="bitwise: results do not depend on placement or faults, bit for bit (fixed-point "
                       "gradient sums); fast: float sums, whose order may differ after a fault (default: %(default)s)")
    group.add_argument("--elastic-dataflow", choices=("reroute", "resize"), default=d.dataflow,
                       help="who computes what after a loss. reroute: micro-batches stay whole, and so does a run, bit "
                       "for bit; resize: those that do not come out even are cut between samples, so that cells are "
                       "even to within one sample, and losses differ by rounding (default: %(default)s)")
    group.add_argument("--elastic-schedule", choices=("1f1b", "split", "search"), default=d.schedule,
                       help="order of a stage's work: 1f1b: a forward and a backward in turn; split: the same, but "
                       "weights' gradients come after the input's, which the stage before waits for; search: "
                       "1f1b until --elastic-profile tells what units cost, and then the fastest order that is found "
                       "for them within the memory (default: %(default)s)")
    group.add_argument("--elastic-placement", choices=(*PLACEMENTS, "search"), default=d.placement,
                       help="where chunks of stages (virtual stages) are on a micro-batch's way: loop: one of each "
                       "stage in turn, and then the next of each; v: two of each stage, one on the way to the last "
                       "stage, one back, so that the first has both ends of the model; search: a loop, until "
                       "--elastic-schedule search finds that steps are shorter with others (default: %(default)s)")
    group.add_argument("--elastic-slices", type=int, metavar="K", default=None,
                       help="slices of each unit's parameters and optimizer state (default: the data-parallel width)")
    group.add_argument("--elastic-replicas", type=int, metavar="N", default=d.replicas,
                       help="live copies of every slice's optimizer state besides the owner's, on other hosts where "
                       "there are any (default: %(default)s)")
    group.add_argument("--elastic-replay", choices=("gradient", "state"), default=d.replay,
                       help="how copies follow: gradient: they are sent the gradient and do the same update; state: "
                       "they are sent the whole new state after it, for optimizers that do not give the same bits on "
                       "another type of device (default: %(default)s)")
    group.add_argument("--elastic-background-mbps", type=float, metavar="X", default=d.background_mbps,
                       help="megabits a second that a rank may fetch in the background, for new copies of slices; 0: "
                       "no limit (default: %(default)s)")
    group.add_argument("--elastic-respawn", action="store_true",
                       help="start another rank in place of each that dies; it joins when it has caught up")
    group.add_argument("--elastic-spares", type=int, metavar="N", default=d.spares,
                       help="of the ranks of all nodes the last N do not train: they are started as training begins, "
                       "wait, and take lost places at once. The script's world is without them (default: %(default)s)")
    group.add_argument("--elastic-profile", metavar="WHAT", default=d.profile,
                       help="what units cost, so that layers can move to where they cost least when cells are lost or "
                       "join: 'measured', or a profile (JSON, see docs/planning.md); without it layers only move when "
                       "they must")
    group.add_argument("--elastic-policy", choices=tuple(POLICIES), default=d.policy,
                       help="what is made of losses and joins: elastic, or what other systems do, to compare them on "
                       "the same runtime; see docs/policies.md (default: %(default)s)")
    group.add_argument("--elastic-verify-every", type=int, metavar="N", default=d.verify_every,
                       help="compare the checksums of weights and optimizer state with those of their copies, each "
                       "slice once in N steps, and heal what is damaged; 0: never (default: %(default)s)")
    group.add_argument("--elastic-on-error", choices=("recover", "stop"), default=d.on_error,
                       help="when the program raises on a rank while it trains: recover: that rank leaves, and the "
                       "others go on, unless they raise as well; stop: the job ends (default: %(default)s)")
    group.add_argument("--elastic-slow", choices=("share", "evict", "off"), default=d.slow,
                       help="when ranks are slower than others that do the same: share: they get fewer micro-batches, "
                       "and, with --elastic-profile, layers leave their stage if that lasts; "
                       "evict: those without whom the others are faster are taken out, too; off: nothing (default: "
                       "share on nodes where every rank has a processor of its own, off on others, where it would "
                       "be noise)")
    group.add_argument("--elastic-redo", choices=("lost", "step"), default=d.redo,
                       help="what is computed again after a loss in mid-step: lost: what the lost cells had done; "
                       "step: all of the step (default: %(default)s)")
    group.add_argument("--elastic-log-mb", type=float, metavar="X", default=d.log_mb,
                       help="megabytes that a rank may keep of what it sends to other stages in a step, so that only "
                       "what is lost has to be computed again; where it is not enough, the step is (default: "
                       "%(default)s)")
    group.add_argument("--elastic-log-format", choices=("text", "json"), default=d.log_format,
                       help="what the launcher prints: text: a line for people each; json: an object each, with the "
                       "names and fields of the records (default: %(default)s)")
    group.add_argument("--elastic-metrics-port", type=int, metavar="PORT", default=d.metrics_port,
                       help="where Prometheus can read metrics of the job, on the node that coordinates; 0: nowhere "
                       "(default: %(default)s)")
    group.add_argument("--elastic-trace", metavar="STEPS", default=d.trace,
                       help="steps, as 10, 10-12 or 10,20-22, of which every rank writes down every operation, wait "
                       "and message, with the recoveries between them; see docs/watching.md")
    group.add_argument("--elastic-emulate", type=usage.path, metavar="PROFILE", default=d.emulate,
                       help="let every rank behave as one accelerator, as fast, with as much memory and with links as "
                       "this profile says (JSON, see docs/emulation.md): it computes what the flags say, which should "
                       "be tiny, and sleeps out the rest")
    group.add_argument("--elastic-device", choices=DEVICES, default=d.device,
                       help="what ranks compute on, each on one device of its own, or shared where there are fewer: "
                       "cpu, cuda (GPUs, of AMD, too), npu, or soft, which is made of software, for tests (default: "
                       "what is there, else the CPU)")
    group.add_argument("--elastic-reduction", choices=("device", "host"), default=d.reduction,
                       help="how gradients and weights go from device to device: device: by the collectives of its "
                       "backend; host: as messages through host memory, for ranks that share a device, which NCCL "
                       "does not take. On the CPU both are the same (default: %(default)s)")
    group.add_argument("--elastic-dvfs", choices=MODES, default=d.dvfs,
                       help="set the clocks of devices with every layout. performance: who holds up the others runs "
                       "as fast as it may; energy: who waits runs slower, as far as no step gets longer. Needs "
                       "--elastic-profile with power and clock_steps; set back when the job ends")
    group.add_argument("--elastic-actuator", choices=[name for name in ACTUATORS if name != Emulated.name],
                       default=d.actuator,
                       help="what sets clocks with --elastic-dvfs, where devices are not emulated: of NVIDIA GPUs, of "
                       "processors that a rank has for itself, or quotas of processor time of a rank's own control "
                       "group (default: %(default)s)")
    group.add_argument("--elastic-inject", type=_injection, action="append", metavar="SPEC", default=None,
                       help="inject a fault, e.g. 'kill:rank=5,step=12,at=backward,grain=3'; may be repeated")
    group.add_argument("--elastic-start-timeout", type=float, metavar="S", default=d.start_timeout,
                       help="limit for all ranks to come up (default: %(default)s)")
    group.add_argument("--elastic-suspect-timeout", type=float, metavar="S", default=d.suspect_timeout,
                       help="how long a suspected or stopped rank (SIGSTOP, debugger, freezer) has to go on before it "
                       "is killed (default: %(default)s)")
    group.add_argument("--elastic-heartbeat-timeout", type=float, metavar="S", default=d.heartbeat_timeout,
                       help="how long a node may be silent before its ranks count as lost, and a coordinator before a "
                       "node looks for another; four times as long without a store (--elastic-store). Who was cut off "
                       "comes again with new ranks (default: %(default)s)")
    group.add_argument("--elastic-hang-timeout", type=float, metavar="S", default=d.hang_timeout,
                       help="how long a rank may come no further while others wait for it before it is killed; three "
                       "times what a step usually takes if that is longer (default: %(default)s)")
    group.add_argument("--elastic-report-timeout", type=float, metavar="S", default=d.report_timeout,
                       help="limit for survivors to answer an interrupt; who does not is killed (default: %(default)s)")
    group.add_argument("--elastic-wait-timeout", type=float, metavar="S", default=d.wait_timeout,
                       help="how long a wait inside a step may last before it is said so, and how long a checkpoint's "
                       "disk, or what has no usual duration, as a rank's first step (default: %(default)s)")
    group.add_argument("--elastic-end-timeout", type=float, metavar="S", default=d.end_timeout,
                       help="how long a script may take to end after training, for loggers and the like, before its "
                       "rank is killed (default: %(default)s)")
    group.add_argument("--elastic-store", metavar="WHAT", default=d.store,
                       help="what decides which node coordinates: auto (embedded from three nodes on, else alone), "
                       "alone, embedded, etcd://HOST:PORT[,HOST:PORT...] (etcds://: over TLS) or "
                       "kubernetes://NAMESPACE/NAME; the same on every node (default: %(default)s)")
    group.add_argument("--elastic-tls-cert", type=usage.path, metavar="FILE", default=None,
                       help="this node's certificate for control connections (PEM), for both servers and clients; "
                       "needs the other two. Without them the coordinator makes one for itself, and the job's token "
                       "alone says who belongs to it")
    group.add_argument("--elastic-tls-key", type=usage.path, metavar="FILE", default=None,
                       help="the key of --elastic-tls-cert (PEM, without a passphrase)")
    group.add_argument("--elastic-tls-ca", type=usage.path, metavar="FILE", default=None,
                       help="certificate of the authority that signed the certificates of all nodes (PEM)")
    return parser
