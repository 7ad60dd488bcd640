// The settlement configuration: what it takes, what it refuses by name, whose it is, and that the credential which it
// names stays.
import { describe, expect, test } from "bun:test";
import { contract, expectError, expectShape, is, type Tenant, UNKNOWN_CREDENTIAL } from "./contract.ts";

const URL_ = "https://facilitator.example.com";
const CONFIG = {
  facilitator_url: is.text,
  facilitator_credential_ref: is.id("cred"),
  created_at: is.dateTime,
  updated_at: is.dateTime,
};

contract((at) => {
  const get = (tenant: Tenant) => tenant.send("GET", "/v1/settlement/config");
  const patch = (tenant: Tenant, json: unknown) => tenant.send("PATCH", "/v1/settlement/config", { json });
  const first = async (tenant: Tenant) => {
    const { id } = await tenant.credential();
    const answer = await patch(tenant, { facilitator_url: URL_, facilitator_credential_ref: id });
    expect(answer.status).toBe(200);
    return { ...answer.body, ref: id };
  };

  test("the settlement configuration is not there at first, then as it was set, and each field changes alone", async () => {
    const tenant = at.tenant();
    expectError(await get(tenant), 404);
    const { ref, ...config } = await first(tenant);
    expectShape(config, CONFIG);
    expect(config).toMatchObject({ facilitator_url: URL_, facilitator_credential_ref: ref });
    expect((await get(tenant)).body).toEqual(config);

    const url = `${URL_}:8443/x402/`;
    const moved = (await patch(tenant, { facilitator_url: url })).body;
    expect(moved).toMatchObject({ facilitator_url: url, facilitator_credential_ref: ref });
    expect(moved.created_at).toBe(config.created_at);
    expect(Date.parse(moved.updated_at)).toBeGreaterThanOrEqual(Date.parse(config.updated_at));
    const { id } = await tenant.credential();
    const rekeyed = (await patch(tenant, { facilitator_credential_ref: id })).body;
    expect(rekeyed).toMatchObject({ facilitator_url: url, facilitator_credential_ref: id });
    expect((await patch(tenant, {})).body).toEqual(rekeyed);
    expect((await get(tenant)).body).toEqual(rekeyed);
  });

  test("the settlement configuration needs both fields the first time, and a problem says which one is missing", async () => {
    const tenant = at.tenant();
    const { id } = await tenant.credential();
    expectError(await patch(tenant, {}), 400, "facilitator_url");
    expectError(await patch(tenant, { facilitator_credential_ref: id }), 400, "facilitator_url");
    expectError(await patch(tenant, { facilitator_url: URL_ }), 400, "facilitator_credential_ref");
    expectError(await get(tenant), 404);
  });

  describe("the settlement configuration is refused with", () => {
    const urls: [string, unknown][] = [
      ["an empty URL", ""],
      ["null", null],
      ["a number", 5],
      ["http", "http://facilitator.example.com"],
      ["http to an exempt host", "http://127.0.0.1:8443"],
      ["no URL", "facilitator.example.com"],
      ["no host", "https://"],
      ["loopback", "https://[::1]"],
      ["a private address", "https://10.0.0.1"],
      ["a link-local address", "https://169.254.169.254"],
      ["an address in disguise", "https://0x0a000001"],
      ["user information", "https://user:secret@facilitator.example.com"],
      ["a query", `${URL_}/?key=secret`],
      ["the URL of a payment", `${URL_}/settle`],
      ["an empty query", `${URL_}/?`],
      ["a fragment", `${URL_}/#a`],
      ["a space", `${URL_}/a b`],
      ["too long a URL", `${URL_}/${"a".repeat(2048)}`],
    ];
    test.each(urls)("a facilitator_url like %s", async (_, facilitator_url) => {
      const tenant = at.tenant();
      const { ref, ...config } = await first(tenant);
      const answer = await patch(tenant, { facilitator_url });
      expectError(answer, 400, "facilitator_url");
      expect(answer.text).not.toContain("secret");
      // Another scheme is told what is accepted, and nothing that would be refused next.
      if (typeof facilitator_url === "string" && /^(?!https:\/\/.)./.test(facilitator_url))
        expect(answer.body.error).toBe("facilitator_url: must be an https URL with a host");
      expect((await get(tenant)).body).toEqual(config);
    });

    test("credentials that are empty, null, unknown or another tenant's", async () => {
      const tenant = at.tenant();
      await first(tenant);
      const foreign = (await at.tenant().credential()).id;
      for (const facilitator_credential_ref of ["", null, "cred_x", UNKNOWN_CREDENTIAL, foreign]) {
        const answer = await patch(tenant, { facilitator_credential_ref });
        expectError(answer, 400, "facilitator_credential_ref");
      }
    });

    test("unknown and fixed fields, and what is no object", async () => {
      const tenant = at.tenant();
      await first(tenant);
      expectError(await patch(tenant, { url: URL_ }), 400, "url");
      expectError(await patch(tenant, { created_at: "2026-11-21T10:00:00Z" }), 400, "created_at");
      expectError(await patch(tenant, []), 400, "body");
    });
  });

  test("the settlement configuration is the tenant's own, and keeps its credential", async () => {
    const [tenant, other] = [at.tenant(), at.tenant()];
    const { ref } = await first(tenant);
    expectError(await get(other), 404);
    const remove = () => tenant.send("DELETE", `/v1/credentials/${ref}`);
    expectError(await remove(), 409);
    const { id } = await tenant.credential();
    await patch(tenant, { facilitator_credential_ref: id });
    expect((await remove()).status).toBe(204);
  });

  test("the settlement configurations of two tenants at once are each one's; first calls of one tenant at once agree", async () => {
    const tenant = at.tenant();
    const { id } = await tenant.credential();
    const json = { facilitator_url: URL_, facilitator_credential_ref: id };
    const answers = await Promise.all(Array.from({ length: 5 }, () => patch(tenant, json)));
    expect(answers.map(({ status }) => status)).toEqual(Array(5).fill(200));
    expect(new Set(answers.map(({ body }) => body.created_at)).size).toBe(1);
  });
});
