"""The page at `/`: chat with a model of this server and watch its load. Static files, no build step."""

from inferencex.runtime.server.web.routes import router

__all__ = ["router"]
