"""A harness of verifiers 0.4 that asks once, without a process per rollout."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["DirectHarness"]


class DirectConfig(vf.HarnessConfig):
    pass


class DirectHarness(vf.Harness[DirectConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_MCP = True  # of tasksets without a tool

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [
            message if isinstance(message, dict) else message.model_dump(exclude_none=True) for message in data.prompt
        ]
        async with httpx.AsyncClient(verify=False, timeout=60) as client:
            answer = await client.post(
                f"{endpoint.rstrip('/')}/chat/completions",
                headers={"authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        failed = answer.status_code != 200
        return ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text if failed else "")
