"""Where the server listens: TLS, ports that are taken, and files that are not there."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime import LLM
from inferencex.runtime.server.config.settings import ServerSettings, Settings
from inferencex.runtime.server.grpc.server import start_grpc
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.grpc.v1 import inference_pb2_grpc
from tests.runtime.server.grpc.calling import NO_KEYS, listening
from tests.runtime.server.serving import serving

openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A certificate for localhost that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", chain], check=True, capture_output=True)
    yield chain, key


async def ask(llm: LLM, credentials: grpc.ChannelCredentials, **options: object) -> str:
    async with (
        serving(llm) as service,
        listening(service, **options) as scene,
        grpc.aio.secure_channel(f"localhost:{scene.server.port}", credentials) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.ListModels(pb.ListModelsRequest(), timeout=10)
        return str(answer.models[0].name)


@openssl
def test_tls(llm: LLM, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    credentials = grpc.ssl_channel_credentials(chain.read_bytes())
    assert asyncio.run(ask(llm, credentials, tls_certificate=chain, tls_key=key)) == "tiny"


@openssl
def test_clients_need_a_certificate_where_that_is_asked_for(llm: LLM, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    options = {"tls_certificate": chain, "tls_key": key, "tls_client_ca": chain}
    trusting = grpc.ssl_channel_credentials(chain.read_bytes())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(ask(llm, trusting, **options))
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    known = grpc.ssl_channel_credentials(chain.read_bytes(), key.read_bytes(), chain.read_bytes())
    assert asyncio.run(ask(llm, known, **options)) == "tiny"


def test_a_port_that_is_taken(llm: LLM) -> None:
    async def run() -> None:
        async with serving(llm) as service, listening(service) as scene:
            taken = Settings(server=ServerSettings(grpc_port=scene.server.port))
            with pytest.raises(OptionError, match=f"cannot listen on 127.0.0.1:{scene.server.port}"):
                await start_grpc(service, taken, NO_KEYS)

    asyncio.run(run())


def test_settings_that_cannot_be(llm: LLM, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(llm) as service:
            with pytest.raises(OptionError, match="grpc_port is not set"):
                await start_grpc(service, Settings(), NO_KEYS)
            absent = {"tls_certificate": tmp_path / "chain.pem", "tls_key": tmp_path / "key.pem"}
            with pytest.raises(OptionError, match=r"tls_certificate: .*chain.pem cannot be read"):
                await start_grpc(service, Settings(server=ServerSettings(grpc_port=0, **absent)), NO_KEYS)

    asyncio.run(run())
