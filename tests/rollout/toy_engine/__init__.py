"""An engine of toy servers: the example of docs/how-to/engines.md, in a package outside agentrl."""

from dataclasses import dataclass

from agentrl.cluster.processes import free_port
from agentrl.rollout.engines.base import Completion, EngineFacts, EnginePlugin, ServerSettings
from agentrl.rollout.engines.processes import ServerPlan
from agentrl.rollout.engines.replica import ServerClient, ServerIdentity
from agentrl.rollout.engines.servers import ManagedServers


class ToyClient(ServerClient):
    title = "toy"

    async def identify(self, needs):
        about = await self.http.get("/about", seconds=30)
        if about["vocabulary"] != needs.vocabulary:
            raise self.unusable_server_error(
                f"its model has {about['vocabulary']} tokens, the policy has {needs.vocabulary}"
            )
        self.has_checksums = True
        return ServerIdentity(release="1.0", version=about["version"])

    async def generate(self, request):
        if request.sampling.top_p < 1:
            raise self.unusable_server_error("it cannot sample with top_p below 1")
        # Request and response are JSON with the fields of the records.
        return await self.http.post("/generate", request, Completion, seconds=None)

    async def score(self, token_ids, *, salt):
        return await self.http.post("/score", {"token_ids": token_ids}, tuple[float, ...], seconds=600)

    async def version_label(self):
        return (await self.http.get("/about", seconds=30))["version"]

    async def set_version_label(self, version):
        await self.http.post("/label", {"version": str(version)}, seconds=30)

    async def load(self, directory):
        await self.http.post("/load", {"directory": directory}, seconds=600)

    async def checksums(self):
        return [await self.http.get("/checksums", seconds=600)]


@dataclass(frozen=True, kw_only=True)
class ToyPlan(ServerPlan):
    model: str

    def arguments(self):
        return ["-m", "toy_engine.server", self.model, self.host, str(self.port)]


class ToyServers(ManagedServers):
    def connect(self, address):
        return ToyClient(address)

    def server_plans(self, gpus):
        ports = [free_port("127.0.0.1") for _ in range(self.settings.replicas)]
        return [ToyPlan(host="127.0.0.1", port=port, model=self.request.policy_path) for port in ports]


class ToyPlugin(EnginePlugin):
    options_model = ServerSettings

    def facts(self, rollout):
        options = self.options(rollout)
        servers = 0 if options.addresses else options.replicas
        return EngineFacts(about=f"{servers} toy servers", servers=servers, start_seconds=options.start_deadline)

    def managed(self, request):
        return ToyServers(request, self.options(request.rollout))
