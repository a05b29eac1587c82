"""A server inside a Python program: `launch_model` starts it on a thread and returns a handle to it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from inferencex.formats.errors import InferenceXError, OptionError
from inferencex.runtime.llm import LLM

if TYPE_CHECKING:
    from inferencex.runtime.server.config.settings import Settings
    from inferencex.runtime.server.run import Running


class ServerHandle:
    """A server that runs in this process. Close it, or use it as a context manager.

    url:   where it listens, such as `http://127.0.0.1:40123`; OpenAI's clients take `url + "/v1"`
    model: what requests call the model
    llm:   the model itself; it may be used beside the server, and its requests share the batch
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: Running | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._answered = threading.Event()  # the server is ready, or has failed
        self._llm: LLM | None = None
        self.model = ""
        self._thread = threading.Thread(target=self._run, name="inferencex-server", daemon=True)

    def __repr__(self) -> str:
        return f"ServerHandle({self.model!r} at {self.url})"

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._of_running().address

    @property
    def llm(self) -> LLM:
        """The model that was loaded at the start."""
        if self._llm is None:
            raise InferenceXError("the server is not running, so it has no model")
        return self._llm

    def close(self) -> None:
        """Stop the server once its requests are done, at the latest after `drain_timeout`, and free its model."""
        self._closing = True  # for a server that does not listen yet
        if self._running is not None and self._thread.is_alive():
            try:
                self._running.loop.call_soon_threadsafe(self._running.stop)
            except RuntimeError:  # the event loop is closed: the server has ended by itself
                self._llm = None
        self._thread.join()
        self._llm = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the server and wait until it is ready; raises what it fails with."""
        self._thread.start()
        try:
            self._answered.wait()
        except BaseException:  # such as Ctrl-C while the model is loaded
            self.close()
            raise
        if self._error is not None:
            self._thread.join()
            raise self._error

    def listening(self, running: Running) -> None:
        """Remember the server; called by it."""
        self._running = running
        if self._closing:
            running.stop()

    def ready(self) -> None:
        """Remember the model; called by the server."""
        with self._of_running().service.registry.resolve(None) as lease:
            self.model, self._llm = lease.model.name, lease.model.llm
        self._answered.set()

    def _run(self) -> None:
        from inferencex.runtime.server.run import serve

        try:
            serve(self._settings, self)
        except BaseException as error:  # raised again by whoever started the server
            self._error = error
        finally:
            self._answered.set()

    def _of_running(self) -> Running:
        if self._running is None:
            raise InferenceXError("the server has not been started")
        return self._running


def launch_model(
    path: str | Path, name: str | None = None, host: str = "127.0.0.1", port: int = 0, **options: Any
) -> ServerHandle:
    """Serve a bundle from this process, and return once it is ready.

    name:    what requests call it; None: the name of its folder
    port:    0 takes a free one
    options: any other setting of a server, by the last part of its name: `max_model_len=2048`, `api_keys=["..."]`,
             `root="bundles"`, `drain_timeout=5.0`

    Raises InferenceXError for what cannot be served. Signals and logging are left to the program; variables
    `INFERENCEX_*` are not read.

        with launch_model("bundles/smollm2") as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    """
    try:
        from inferencex.runtime.server import run  # noqa: F401  its packages are looked for here, to say which is missing
        from inferencex.runtime.server.config.catalogue import keys
        from inferencex.runtime.server.config.load import load_settings
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("inferencex"):
            raise
        raise OptionError(
            f"serving needs the package {error.name!r}, which is not installed; install inferencex[serve]"
        ) from error
    known = {key.name: key for key in keys()}
    values: dict[str, Any] = {"model.path": [path], "server.host": host, "server.port": port}
    if name is not None:
        values["model.served_model_name"] = [name]
    for option, value in options.items():
        key = known.get(option)
        if key is None or key.path in values:
            raise OptionError(f"launch_model has no option {option!r}; it takes: {', '.join(sorted(known))}")
        values[key.path] = [value] if key.repeated and not isinstance(value, list | tuple) else value
    handle = ServerHandle(load_settings(values, {}).settings)
    handle.start()
    return handle
