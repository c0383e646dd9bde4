"""All models of a server: loaded, named, swapped and unloaded while it serves. On the loop's thread.

What one call changes is changed between two awaits, so requests see one state or the other. Loads are made one at a time, for each is
checked against the memory that is left; nothing else waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from engine_c import EngineError
from service.artifact import Artifact, ArtifactError, read_artifact
from service.config import ConfigError, ServeConfig
from service.faults import Draining, InvalidField, OperatorFault, ShutDown, UnknownModel, shown
from service.hosted import Hosted, ModelState
from service.metrics import Metrics
from service.opening import begin_opening, team_config
from service.printable import counted
from workers.need import MemoryNeed, NoRoom, memory_need
from workers.placement import PlacementError
from workers.plan import PlanError
from workers.segments import SegmentError
from workers.supervisor import SupervisorError
from workers.team import Team

log = logging.getLogger("colibri.service")
DEFAULT = "default"  # stands for the default model, as the empty name does, unless a model is called so
_FAREWELL = 1.0  # seconds for the statuses of broken-off calls to reach their callers
_READY_WITHIN = 5.0  # seconds for the engine that is swapped to to end a step
_MAX_NAME = 128  # bytes
_NO_NODES = {field.name: field.default for field in fields(ServeConfig) if field.name.startswith("nodes")}  # they hold the first model only
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Swapped:
    """What came of a swap."""

    model: Hosted
    previous: str
    seconds: float


class ModelHost:
    """Has one model, the default, from `start` to `close`, and any number of others."""

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._models: dict[str, Hosted] = {}  # in the order of loading
        self._coming: set[str] = set()  # names of models that are being loaded
        self._default: Hosted | None = None
        self._draining = False
        self._one_load = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    @property
    def default(self) -> Hosted:
        """The model that requests without a name go to."""
        if self._default is None:
            raise Draining
        return self._default

    @property
    def models(self) -> tuple[Hosted, ...]:
        """All that are loaded, in the order of loading."""
        return tuple(self._models.values())

    @property
    def coming(self) -> tuple[str, ...]:
        """Names of the models that are being loaded."""
        return tuple(sorted(self._coming))

    @property
    def draining(self) -> bool:
        """Nothing new is taken."""
        return self._draining

    @property
    def calls(self) -> int:
        """Calls being answered."""
        return sum(hosted.desk.calls for hosted in self.models)

    def resolve(self, name: str) -> Hosted:
        """The model that a request means. Raises UnknownModel, or Draining once the server is on its way down."""
        if self._draining:
            raise Draining
        hosted = self._models.get(name)
        if hosted is None and name in ("", DEFAULT):
            hosted = self._default
        if hosted is None or not hosted.takes_requests:
            raise UnknownModel(name, served=[model.name for model in self.models if model.takes_requests])
        return hosted

    def find(self, name: str) -> Hosted:
        """The loaded model an operator means, the default if the name is empty. Raises OperatorFault."""
        if not name:
            return self.default
        if name in self._coming:
            raise _not_ready(name, "is still being loaded; try again")
        if name not in self._models:
            there = ", ".join(map(repr, self._models))
            raise OperatorFault("NOT_FOUND", "UNKNOWN_MODEL", f"no model {shown(name)} is loaded; there is {there}", model=name)
        return self._models[name]

    # ------------------------------------------------------------ life

    async def start(self, artifact: Artifact, opening: Future[Team]) -> None:
        """Serves the first model, the default. Raises ConfigError, or what engine and workers raise."""
        self._default = hosted = await Hosted.open(self._config, artifact, self._metrics, opening)
        self._models[hosted.name] = hosted
        hosted.move(ModelState.SERVING)

    async def load(self, path: Path, *, name: str = "", settings: dict[str, object] | None = None) -> Hosted:
        """Opens a further model with the server's settings but for `settings`. Raises InvalidField or OperatorFault; nothing is left then.

        Going away from the call stops it only while it waits for its turn.
        """
        begun = asyncio.Event()
        return await self.see_through(self._load(path, name, settings or {}, begun), begun=begun)

    async def unload(self, name: str, *, grace: float | None = None) -> int:
        """Takes a model away: its requests have `grace` seconds (the server's drain grace) to finish. Returns how many were broken off."""
        hosted = self.find(name)
        if hosted is self._default:
            sentence = f"model {shown(hosted.name)} is the default; make another one the default first (colibri models swap, SwapModel)"
            raise OperatorFault("FAILED_PRECONDITION", "MODEL_IS_DEFAULT", sentence, model=name)
        if hosted.state is not ModelState.READY:
            raise _not_ready(hosted.name, "is being unloaded already")
        hosted.move(ModelState.DRAINING)
        return await self.see_through(self._unload(hosted, self._config.drain_grace if grace is None else grace))

    async def swap(self, name: str) -> Swapped:
        """Makes a loaded model the default once its engine is between two steps. Raises OperatorFault; nothing has changed then."""
        began = time.perf_counter()
        target = self._swappable(name)
        try:
            await asyncio.wait_for(target.engine.boundary(), _READY_WITHIN)
        except TimeoutError:
            raise _not_ready(name, f"has not ended its step within {_READY_WITHIN:g} s; try again") from None
        target = self._swappable(name)
        previous = self.default
        if target is not previous:
            previous.move(ModelState.READY)
            target.move(ModelState.SERVING)
            self._default = target
            log.info("%s is the default now, after %s", target.name, previous.name)
        return Swapped(target, previous.name, time.perf_counter() - began)

    def drain(self) -> None:
        """Takes nothing new from now on."""
        self._draining = True
        for hosted in self.models:
            hosted.desk.drain()

    async def wait_idle(self, timeout: float) -> bool:
        """Waits until every call has been answered; False if some have not in time."""
        waits = [hosted.desk.wait_idle(timeout) for hosted in self.models]
        return all(await asyncio.gather(*waits))

    def break_off(self) -> None:
        """Ends what is left, for the server goes down."""
        for hosted in self.models:
            hosted.desk.break_off(lambda request: ShutDown(ran=request.ran))

    async def close(self) -> None:
        """Closes all models, once the changes under way have come to their end."""
        self._draining = True
        for hosted in self.models:
            await hosted.stop_moving()
        if self._changes:
            await asyncio.wait(self._changes)
        for hosted in reversed(self.models):
            await hosted.close()
        self._models.clear()

    # ------------------------------------------------------------ changes

    async def see_through(self, work: Coroutine[Any, Any, _T], *, begun: asyncio.Event | None = None) -> _T:
        """Sees a change through even if the operator that asked for it has gone; if `begun` is given, not before `work` has set it."""
        if self._draining:
            work.close()
            raise Draining
        task = asyncio.create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if begun is not None and not begun.is_set():
                task.cancel()
            raise

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if task.cancelled():
            log.info("an operator has gone; the change it asked for had not begun and was dropped")
        elif (error := task.exception()) is not None:
            log.warning("an operator's change failed: %s", error)

    async def _load(self, path: Path, name: str, settings: dict[str, object], begun: asyncio.Event) -> Hosted:
        async with self._one_load:
            begun.set()
            if self._draining:
                raise Draining
            artifact = await self._readable(path)
            name = name or artifact.name
            self._check_name(name)
            config = self._config_for(path, name, settings)
            self._coming.add(name)
            try:
                await self._check_memory(config)
                hosted = await self._opened(config, artifact)
            finally:
                self._coming.discard(name)
            self._models[name] = hosted
        let_in = self._config.max_message_bytes or self.default.model.bounds.message_bytes
        if hosted.model.bounds.message_bytes > let_in:
            log.warning("%s could take requests of more than the %d bytes that this server was started for", name, let_in)
        log.info("loaded %s from %s (worker processes: %d)", name, path, len(hosted.team.plan.workers))
        return hosted

    async def _readable(self, path: Path) -> Artifact:
        if not path.is_absolute():
            raise InvalidField("path", f"{shown(str(path))} is not absolute; the server's working directory is none of yours")
        try:
            return await asyncio.to_thread(read_artifact, path)
        except ArtifactError as error:
            raise InvalidField("path", str(error)) from error

    def _check_name(self, name: str) -> None:
        if len(name.encode()) > _MAX_NAME or not name.isprintable():
            raise InvalidField("name", f"{shown(name)} is no name; give at most {_MAX_NAME} bytes that can be printed")
        if name == DEFAULT:
            raise InvalidField("name", f"{shown(name)} means the default model, whichever that is; give this one another name")
        if name in self._models or name in self._coming:
            sentence = f"a model {shown(name)} is loaded already; give this one another name or unload that one"
            raise OperatorFault("ALREADY_EXISTS", "MODEL_NAME_TAKEN", sentence, model=name)

    def _config_for(self, path: Path, name: str, settings: dict[str, object]) -> ServeConfig:
        try:
            return self._config.with_(model=path, name=name, **_NO_NODES, **settings)
        except ConfigError as error:
            field = next((setting for setting in settings if str(error).startswith(setting)), "path")
            raise InvalidField(field, str(error)) from error

    async def _check_memory(self, config: ServeConfig) -> None:
        """Refuses what does not fit before anything is made for it."""
        mapped = sum(hosted.team.image.bytes for hosted in self.models if hosted.team.image.mode == "map")
        try:
            need = await asyncio.to_thread(memory_need, config.model, team_config(config), in_use=mapped)
        except NoRoom as error:
            raise OperatorFault("RESOURCE_EXHAUSTED", "NO_MEMORY", str(error)) from error
        except PlanError as error:
            raise InvalidField("workers_per_node", str(error)) from error
        except (EngineError, SegmentError) as error:
            raise InvalidField("path", f"{config.model}: {error}") from error
        if not need.fits:
            raise _no_memory(need)

    async def _opened(self, config: ServeConfig, artifact: Artifact) -> Hosted:
        try:
            return await Hosted.open(config, artifact, self._metrics, begin_opening(config))
        except (ConfigError, EngineError) as error:
            raise InvalidField("path", str(error)) from error
        except PlacementError as error:
            raise OperatorFault("RESOURCE_EXHAUSTED", "NO_MEMORY", str(error)) from error
        except PlanError as error:
            raise InvalidField("workers_per_node", str(error)) from error
        except (SegmentError, SupervisorError, OSError) as error:
            raise OperatorFault("ABORTED", "LOAD_FAILED", f"{config.model} could not be loaded: {error}; nothing was changed") from error

    async def _unload(self, hosted: Hosted, grace: float) -> int:
        left = 0
        if not await hosted.desk.wait_idle(grace):
            left = len(hosted.desk.streams)
            log.warning("breaking off %s of %s, which is unloaded", counted(left, "request"), hosted.name)
            hosted.desk.break_off(lambda request: ShutDown(ran=request.ran, what=f"model {shown(hosted.name)} was unloaded"))
            await hosted.desk.wait_idle(_FAREWELL)
        await hosted.close()
        del self._models[hosted.name]
        log.info("unloaded %s", hosted.name)
        return left

    def _swappable(self, name: str) -> Hosted:
        if self._draining:
            raise Draining
        if not name:
            raise InvalidField("name", "is empty; name the model that is to be the default")
        target = self.find(name)
        if not target.takes_requests:
            raise _not_ready(name, "is being unloaded")
        if target.desk.unable:
            raise _not_ready(name, f"has nobody who computes ({target.desk.unable})")
        return target


def _not_ready(name: str, what: str) -> OperatorFault:
    return OperatorFault("FAILED_PRECONDITION", "MODEL_NOT_READY", f"model {shown(name)} {what}", model=name)


def _no_memory(need: MemoryNeed) -> OperatorFault:
    return OperatorFault(
        "RESOURCE_EXHAUSTED",
        "NO_MEMORY",
        f"the model needs {need.sentence}; {need.available >> 20} MiB is free: unload another model or give this one less KV memory",
        needed_bytes=str(need.total),
        available_bytes=str(need.available),
    )
