// TOLLGATE_DENY_HOSTS: what it names is neither written down nor called, on any path, though it is exempt.
import { expect, test } from "bun:test";
import { networkInterfaces } from "node:os";
import { contract, expectError } from "./contract.ts";

const OWN = Object.values(networkInterfaces())
  .flatMap((addresses = []) => addresses)
  .flatMap(({ address, family, internal }) => (internal || family !== "IPv4" ? [] : address));

contract((at) => {
  test("a denied host is refused by name of the field, and an agent that has it is not called", async () => {
    const tenant = at.tenant();
    const route = at.upstream();
    const port = new URL(route.url).port;
    const { id } = await tenant.agent({ upstream_url: route.url });
    expect((await tenant.invoke(id)).status).toBe("succeeded");
    await at.gateway.stop();
    await at.gateway.restart({ TOLLGATE_DENY_HOSTS: "::ffff:127.0.0.1, denied.example.com" });

    const json = (upstream_url: string) => ({ json: { upstream_url } });
    for (const host of [`127.0.0.1:${port}`, `[::ffff:127.0.0.1]:${port}`, "0x7f.1", "Denied.example.com."]) {
      expectError(await tenant.send("PATCH", `/v1/agents/${id}`, json(`http://${host}/`)), 400, "upstream_url");
    }
    const { id: facilitator_credential_ref } = await tenant.credential();
    const config = { facilitator_url: "https://denied.example.com", facilitator_credential_ref };
    const refused = await tenant.send("PATCH", "/v1/settlement/config", { json: config });
    expectError(refused, 400, "facilitator_url");

    expect(await tenant.invoke(id)).toMatchObject({ status: "failed", error_class: "ssrf_blocked" });
    expectError(await tenant.send("POST", `/v1/proxy/${id}/stream`, { json: {} }), 502);
    expect(route.seen.length).toBe(1);
    await at.gateway.stop();
    await at.gateway.restart({ TOLLGATE_DENY_HOSTS: "" });
    expect((await tenant.invoke(id)).status).toBe("succeeded");
  });

  test("an address of the machine itself is refused, and so is a port of another protocol", async () => {
    const tenant = at.tenant();
    for (const host of [...OWN, "8.8.8.8:25", "8.8.8.8:6379"]) {
      const json = { name: "x", upstream_url: `http://${host}/` };
      expectError(await tenant.send("POST", "/v1/agents", { json }), 400, "upstream_url");
    }
  });
});
