"""AdapterManager: many adapters on one frozen base, each counted, saved, resumed, added and dropped alone.

It holds one ResumeManager per adapter, under `<root>/adapters/<name>`, and what they share: the control plane, the
watch over signals and walltime, and the base's fingerprint. What it adds is which adapter is active, what of the model
is whose, and that a stop seen by one is a stop for all. How an adapter came into the model it does not ask.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from megaresume.adapters.admission import Tally, admit, check_allowed
from megaresume.adapters.fingerprint import base_fingerprint
from megaresume.adapters.initialise import initialise_from
from megaresume.adapters.naming import decode_name, encode_name
from megaresume.adapters.objects import AdapterObjects
from megaresume.adapters.peft import export_adapter
from megaresume.errors import ConfigurationError
from megaresume.manager import ResumeManager, ResumeReport
from megaresume.megatron import lora
from megaresume.megatron.live import device_of
from megaresume.megatron.lora import LoraConfig
from megaresume.megatron.own_streams import OwnStreams
from megaresume.megatron.parallel import replica_groups
from megaresume.megatron.parameters import describe_parameters
from megaresume.run_objects import Shared, find_place, gather_objects
from megaresume.state.description import Parameter
from megaresume.state.registered import Registered
from megaresume.store import layout
from megaresume.store.control import DEFAULT_TIMEOUT_S, ControlPlane
from megaresume.store.rendezvous import open_control_plane
from megaresume.store.rootcheck import check_root
from megaresume.watch import Watch

if TYPE_CHECKING:
    from megaresume.data.sampler import DataParallelBatchSampler

logger = logging.getLogger("megaresume.adapters")

ADAPTERS = "adapters"


@dataclass(frozen=True)
class AdapterReport:
    """What `resume` did for one adapter, on every rank the same.

    resumed: what every run reports (checkpoint, step, what was passed over, ...). tally: how many tensors matched what
    was loaded; None for an adapter that starts fresh. Random numbers are the adapter's own streams, always.
    """

    name: str
    resumed: ResumeReport
    tally: Tally | None


@dataclass
class _Adapter:
    key: str
    run: ResumeManager
    objects: AdapterObjects
    streams: OwnStreams
    allow: frozenset[str]
    tally: Tally | None = None
    started: bool = False


class AdapterManager:
    """Makes many adapters on one frozen base stop anywhere and go on, each as if it had never stopped.

    Args:
        root: directory shared by all ranks; each adapter is a root of its own in `<root>/adapters`.
        model: the model with its frozen base loaded, or the list of its virtual pipeline chunks.
        base: path or name of the base model: recorded, and named in exports. What is compared is its fingerprint.
        save_every, keep_last, verify, replay: as for ResumeManager, for every adapter.
        stop_signals, job_end, timeout_s: as for ResumeManager, for the process.

    The base is every parameter that needs no gradient now and belongs to no attached LoRA: freeze and load it first.
    Collective over all ranks: everything but `active` and `[name]`.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        *,
        model: Any,
        base: str | PathLike[str] | None = None,
        save_every: int | None = None,
        keep_last: int | None = None,
        verify: str = "load",
        replay: str = "report",
        stop_signals: Iterable[str] = ("SIGTERM", "SIGUSR1"),
        job_end: float | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.root = Path(root)
        self.base = None if base is None else os.fspath(base)
        self.should_stop = False
        # One at a time and small: no adapter keeps a thread, a connection and a copy of itself for its saves.
        self._settings = {
            "save_every": save_every,
            "keep_last": keep_last,
            "verify": verify,
            "replay": replay,
            "async_save": False,
        }
        self._chunks: list[torch.nn.Module] = list(
            gather_objects(model=model, optimizer=None, scheduler=None, data=None, register=None).chunks
        )
        self._adapters: dict[str, _Adapter] = {}
        self._last: str | None = None
        self._closed = False
        place = find_place(None)
        control = open_control_plane(timeout_s=timeout_s, label=place.stem)
        check_root(self.root, control=control)
        frozen: dict[str, Parameter] = {}
        control.together("describe the base", lambda: frozen.update(_frozen(self._chunks)))
        self.base_fingerprint = base_fingerprint(frozen, replica_groups(), control)
        self._shared = Shared(place, control, Watch(rank=place.rank, stop_signals=stop_signals, job_end=job_end))

    # --- which adapters ----------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        config: LoraConfig | Mapping[str, Any],
        *,
        optimizer: Any,
        scheduler: Any | None = None,
        data: Mapping[str, DataParallelBatchSampler] | None = None,
        parameters: Callable[[str], bool] | None = None,
        seed: int = 1234,
        register: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        resume_from: int | str | PathLike[str] | None = None,
        start_fresh: bool = False,
        allow: Collection[str] = (),
        **settings: Any,
    ) -> None:
        """Take in an adapter whose parameters are in the model already, with what trains it. It begins with `resume`.

        config: of `lora.attach`; or, for adapters from elsewhere, any JSON that must be the same when it is loaded.
        optimizer, scheduler, data, register, extra, resume_from, start_fresh: as for ResumeManager, the adapter's own.
        parameters: which parameters are the adapter's, by their global names; default: those of the LoRA of this name.
        seed: of the adapter's own random streams.
        allow: differences and findings that are taken as they are, by name: "base", "alpha", "dropout", ... (names in
            the config), "nonfinite", "zero_b"; for `init_from` also "missing" and "unexpected".
        settings: save_every, keep_last, verify, replay, load_rng, allow_data_change, ... where they differ for this
            adapter.

        Raises ConfigurationError for a name that is taken or cannot be one, a predicate that finds nothing, takes
        another adapter's parameters, or takes one that needs no gradient; UnsupportedError for an optimizer that trains
        anything else. Nothing is saved then.
        """
        key = encode_name(name)
        if "async_save" in settings:
            raise ConfigurationError("async_save: adapters are saved before training goes on; leave it out")
        if name in self._adapters:
            raise ConfigurationError(f"adapter {name!r} is there already: remove it first")
        facts = config.facts() if isinstance(config, LoraConfig) else dict(config)
        if "name" in facts:
            raise ConfigurationError(f"adapter {name!r}: the config's own 'name' is where its name is stored")
        allowed = check_allowed(allow, facts, f"adapter {name!r}")
        selects = parameters or (lambda global_name: lora.belongs_to(global_name, key))
        own, buffers = self._select(name, selects)
        streams = OwnStreams(device_of(self._chunks), seed=seed, coordinate=self._shared.place.coordinate)

        def check(path: Path, control: ControlPlane, objects: AdapterObjects) -> None:
            adapter = self._adapters[name]
            adapter.tally = admit(
                path,
                control,
                self._shared.place,
                objects.parameters,
                b_matrices=isinstance(config, LoraConfig),
                allow=adapter.allow,
            )

        objects = AdapterObjects(
            chunks=self._chunks,
            optimizer=optimizer,
            scheduler=scheduler,
            data=dict(data or {}),
            # The process's own state (megatron's rerun machine) is not an adapter's to save.
            registered=Registered(dict(register or {})),
            parameters=own,
            buffers=buffers,
            own_streams=streams,
            own_facts={"adapter": {"name": name, **facts}, "base": {"fingerprint": self.base_fingerprint}},
            check=check,
        )
        changes = {"base": "base.fingerprint", **{field: f"adapter.{field}" for field in facts}}
        run = ResumeManager(
            self.root / ADAPTERS / key,
            model=objects,
            extra={**(extra or {}), "base": self.base},
            resume_from=resume_from,
            start_fresh=start_fresh,
            allow_model_change=frozenset(changes[each] for each in allowed if each in changes),
            shared=self._shared,
            **{**self._settings, **settings},
        )
        self._adapters[name] = _Adapter(key, run, objects, streams, allowed)

    def remove(self, name: str) -> None:
        """Save what is not saved yet and let the adapter go, out of the model too where it is LoRA. Its root stays."""
        adapter = self._adapter(name)
        adapter.run.close()
        lora.detach(self._chunks, adapter.key)
        del self._adapters[name]
        if self._last == name:
            self._last = None

    def on_disk(self) -> list[str]:
        """Names of the adapters that have a root here, sorted; found by rank 0."""
        directory = self.root / ADAPTERS
        control = self._shared.control
        names: list[str] = control.decide("list adapters", lambda: sorted(_roots(directory)))
        return names

    def absent(self) -> list[str]:
        """Names of the adapters on disk that this process has not added. They are left as they are."""
        return [name for name in self.on_disk() if name not in self._adapters]

    def __getitem__(self, name: str) -> ResumeManager:
        """The adapter's own manager: `step`, `num_microbatches`, `consumed_train_samples`, `extra`, `advance`."""
        return self._adapter(name).run

    def __iter__(self) -> Iterator[str]:
        """The adapters' names, in the order they were added."""
        return iter(list(self._adapters))

    # --- their lives -------------------------------------------------------------------------------------------------

    def resume(
        self,
        name: str,
        *,
        init_from: str | PathLike[str] | None = None,
        weights_only: bool = False,
        skip_data: bool = True,
    ) -> AdapterReport:
        """Restore the adapter's newest checkpoint (or what `resume_from` asks for), or start it fresh. Once, before its
        training.

        `init_from` is a PEFT directory whose weights a *fresh* adapter begins with: optimizer, schedule, data and
        random numbers are new. An adapter with checkpoints of its own goes on from them, which is said. `weights_only`
        and `skip_data` are those of ResumeManager.resume.

        Raises what ResumeManager.resume raises; StateMismatchError names adapter and field, with the numbers of tensors
        that matched, were missing or unexpected. Every other adapter is as it was.
        """
        adapter = self._adapter(name)
        self._check_frozen(name)
        adapter.tally = None
        resumed = adapter.run.resume(weights_only=weights_only, skip_data=skip_data)
        adapter.started = True
        adapter.run.extra["base"] = self.base
        if resumed.path is None:
            adapter.tally = None  # of a checkpoint that was matched, and then passed over
        if init_from is not None and resumed.path is None:
            adapter.tally = initialise_from(
                Path(init_from), adapter.objects, adapter.key, self._shared, allow=adapter.allow
            )
            self._say(f"adapter {name}: begins with the weights of {init_from}, all else fresh; {adapter.tally}")
        elif init_from is not None:
            self._say(f"adapter {name}: init_from {init_from} is passed over for its own {resumed.path}")
        elif adapter.tally is not None:
            left_out = ", ".join(resumed.left_out) or "nothing"
            self._say(
                f"adapter {name}: {adapter.tally}; not restored: {left_out}; the process's own random streams are not"
            )
        self.should_stop = self.should_stop or adapter.run.should_stop
        return AdapterReport(name, resumed, adapter.tally)

    def resume_all(self) -> dict[str, AdapterReport]:
        """`resume` of every adapter added and not resumed yet; says which others lie on disk."""
        reports = {name: self.resume(name) for name, adapter in list(self._adapters.items()) if not adapter.started}
        if absent := self.absent():
            self._say(f"{self.root}: on disk, not added here, and left as they are: {', '.join(absent)}")
        return reports

    @contextlib.contextmanager
    def active(self, name: str) -> Iterator[ResumeManager]:
        """In this context the model runs through this adapter, and everything draws from the adapter's random streams.

        Forward and backward belong in one context. Not collective.
        """
        adapter = self._adapter(name)
        with adapter.streams.in_use(), lora.active(self._chunks, adapter.key):
            yield adapter.run

    def end_step(self, name: str, **step: Any) -> None:
        """Count a finished step of this adapter; the arguments are those of `ResumeManager.end_step`."""
        run = self._adapter(name).run
        stop = False
        if self._last not in (None, name):
            # Here and not at that adapter's next step: its last line is in the log, and a stop is seen one step later.
            stop = self._adapter(str(self._last)).run.settle()
        self._last = name
        run.end_step(**step)
        if stop or run.should_stop:
            self._stop()

    def save(self, name: str) -> Path:
        """Save this adapter now, and nothing of any other. See `ResumeManager.save`."""
        return self._adapter(name).run.save()

    def export(self, name: str, path: str | PathLike[str]) -> None:
        """Save a LoRA adapter, and write it whole into a new PEFT directory.

        Rank 0 puts it together from the checkpoint's files; no tensor moves between ranks. ConfigurationError, on all
        ranks, where `path` exists.
        """
        adapter = self._adapter(name)
        checkpoint = adapter.run.save()

        def write() -> int:
            return export_adapter(checkpoint, Path(path), key=adapter.key, base=self.base)

        count = self._shared.control.decide(f"export adapter {name}", write)
        self._say(f"adapter {name}: exported to {path}, {count} tensors")

    def close(self) -> None:
        """Save what is not saved yet of every adapter that was resumed, and let go of signals and files."""
        if self._closed:
            return
        try:
            for adapter in self._adapters.values():
                adapter.run.close()
            self._shared.control.close()
            steps = [adapter.run.step for adapter in self._adapters.values()]
            self._shared.watch.ended(stopped=self.should_stop, step=max(steps, default=0))
        finally:
            self._closed = True
            self._shared.watch.release()

    def __enter__(self) -> AdapterManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The other ranks may be gone or elsewhere: nothing collective can be done any more.
        self._closed = True
        for adapter in self._adapters.values():
            adapter.run.__exit__(kind, error, trace)
        self._shared.watch.release()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _adapter(self, name: str) -> _Adapter:
        if self._closed:
            raise ConfigurationError("this AdapterManager is closed")
        if name not in self._adapters:
            raise ConfigurationError(f"no adapter {name!r} here; there are: {', '.join(self._adapters) or 'none'}")
        return self._adapters[name]

    def _select(
        self, name: str, selects: Callable[[str], bool]
    ) -> tuple[dict[str, Parameter], dict[str, torch.Tensor]]:
        """The adapter's part of the model's description on this rank. Collective: somewhere it must have something."""
        box: list[tuple[dict[str, Parameter], dict[str, torch.Tensor]]] = []

        def select() -> int:
            parameters, buffers = describe_parameters(self._chunks, replica_groups())
            own = {each: parameter for each, parameter in parameters.items() if selects(each)}
            if frozen := [each for each, parameter in own.items() if not parameter.trainable]:
                raise ConfigurationError(f"adapter {name!r}: needs no gradient, so would never train: {_some(frozen)}")
            for other, adapter in self._adapters.items():
                if twice := sorted(own.keys() & adapter.objects.parameters.keys()):
                    raise ConfigurationError(f"adapter {name!r}: already of adapter {other!r}: {_some(twice)}")
            # A buffer's name has its pipeline chunk in front.
            box.append((own, {each: buf for each, buf in buffers.items() if selects(each.partition(".")[2])}))
            return len(own)

        counts = self._shared.control.together(f"find adapter {name}", select)

        def check_found() -> None:
            if not any(counts or []):
                raise ConfigurationError(
                    f"adapter {name!r}: no parameter of the model is its own; attach it first, or check `parameters`"
                )

        self._shared.control.decide(f"find adapter {name}", check_found)
        return box[0]

    def _check_frozen(self, name: str) -> None:
        """The base must be frozen whenever an adapter begins, not only when it was attached for the first time."""

        def check() -> None:
            known = {
                id(each.tensor) for adapter in self._adapters.values() for each in adapter.objects.parameters.values()
            }
            loose = [
                each
                for chunk in self._chunks
                for each, parameter in chunk.named_parameters()
                if parameter.requires_grad and id(parameter) not in known
            ]
            if loose:
                raise ConfigurationError(
                    f"adapter {name!r}: {len(loose)} parameters need a gradient and are no adapter's: {_some(loose)}. "
                    "Freeze the base (requires_grad_(False)), and add every adapter before one of them is resumed."
                )

        self._shared.control.together(f"check what trains beside adapter {name}", check)

    def _stop(self) -> None:
        for adapter in self._adapters.values():
            if adapter.started and not adapter.run.should_stop:
                adapter.run.poll()  # sees the stop too, and saves
        self.should_stop = True

    def _say(self, line: str) -> None:
        if self._shared.place.rank == 0:
            logger.info(line)


def _frozen(chunks: list[torch.nn.Module]) -> dict[str, Parameter]:
    """The base's part of the model's description on this rank."""
    parameters, _ = describe_parameters(chunks, replica_groups())
    adapted = lora.attached(chunks)
    return {
        name: parameter
        for name, parameter in parameters.items()
        if not parameter.trainable and not any(lora.belongs_to(name, key) for key in adapted)
    }


def _roots(directory: Path) -> Iterator[str]:
    for entry in os.listdir(directory) if directory.is_dir() else []:
        name = decode_name(entry)
        if name is not None and (directory / entry / layout.ATTEMPTS).is_dir():
            yield name


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
