"""Requests of all kinds, made from the server's own description of its API: what it answers is what it describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("schemathesis", reason="needs the package schemathesis")

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.runtime.server.idle import check_idle
from tests.runtime.server.running import RunningServer

ADMIN_KEY, KEY = "the-admin-key", "a-user-key"
SEED = 1
MAX_EXAMPLES = 20  # of each operation
NEEDS_SENSE = ("/v1/models", "/detokenize")  # bodies that fit the description name bundles or tokens there are not
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def server(tiny_chat_bundle: Path) -> Iterator[RunningServer]:
    """A server whose model has a short context, so that no request takes long."""
    env = {"INFERENCEX_SERVER__API_KEYS": KEY, "INFERENCEX_SERVER__ADMIN_KEYS": ADMIN_KEY}
    flags = ("--model-path", tiny_chat_bundle, "--model-root", tiny_chat_bundle.parent, "--max-model-len", "64")
    with RunningServer(*flags, "--port", "0", "--threads", "1", "--request-timeout", "10", env=env) as running:
        running.wait_until_ready()
        yield running
        check_idle(running.url, ADMIN_KEY)
        assert running.stop() == 0
    assert "Traceback" not in running.log, running.log


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name.lower())
def test_answers_are_as_described(server: RunningServer, mode: GenerationMode) -> None:
    """Bodies, paths and queries that fit the description, and ones that do not: on every path, as an administrator."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=SchemathesisConfig(seed=SEED))
    failures: list[str] = []
    for found in schema.get_all_operations():
        operation = found.ok()
        try:
            exercise(operation, mode)
        except (FailureGroup, Failure) as failure:
            failures.append(f"{operation.label}: {failure}")
    assert not failures, "\n\n".join(failures)


def exercise(operation: APIOperation, mode: GenerationMode) -> None:
    """Send what one operation may be sent, and check the answers."""
    statuses: set[int] = set()

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=MAX_EXAMPLES,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        answer = case.call_and_validate(headers={"Authorization": f"Bearer {ADMIN_KEY}"}, checks=CHECKS, timeout=30)
        statuses.add(answer.status_code)

    try:
        send()
    except hypothesis.errors.Unsatisfiable:  # nothing can be wrong with a request that takes nothing
        assert mode is GenerationMode.NEGATIVE
    else:
        assert statuses, f"nothing was sent to {operation.label}"
        if mode is GenerationMode.POSITIVE and "{" not in operation.path:
            assert any(status < 300 for status in statuses) or operation.path in NEEDS_SENSE, operation.label
