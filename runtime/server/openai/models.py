"""`GET /v1/models`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.openai.answers import as_json
from inferencex.runtime.server.openai.context import Context
from inferencex.runtime.server.openai.protocol.errors import ERROR_RESPONSES
from inferencex.runtime.server.openai.protocol.models import Model, ModelList
from inferencex.runtime.server.openai.route import StrictRoute

router = APIRouter(route_class=StrictRoute)


@router.get(
    "/v1/models",
    tags=["models"],
    summary="List the models",
    response_model=None,
    responses={**ERROR_RESPONSES, 200: {"model": ModelList}},
)
async def list_models(request: Request) -> Response:
    """List the models that can be asked, the default one first."""
    context = Context.of(request)
    return as_json(ModelList(data=[_model(context, model) for model in context.service.registry.list()]))


@router.get(
    "/v1/models/{model:path}",
    tags=["models"],
    summary="Describe a model",
    response_model=None,
    responses={**ERROR_RESPONSES, 200: {"model": Model}},
)
async def get_model(model: str, request: Request) -> Response:
    """Describe the model of this name."""
    context = Context.of(request)
    return as_json(_model(context, context.model(model)))


def _model(context: Context, model: ServedModel) -> Model:
    return Model(
        id=model.name,
        created=model.created,
        max_model_len=model.max_model_len,
        version=model.version,
        aliases=list(context.service.registry.get(model.name).aliases),
    )
