// The contract of /v1/credentials: shapes, the match of source and secret, rotation, deletion. That no secret
// comes out anywhere is in secrets.test.ts.
import { describe, expect, test } from "bun:test";
import {
  CREDENTIAL,
  contract,
  expectError,
  expectNoBody,
  expectRequestId,
  expectShape,
  is,
  type Json,
  UNKNOWN_CREDENTIAL,
} from "./contract.ts";

const MANAGED = { name: "key", auth_type: "bearer", source: "managed", plaintext: "correct horse" };
const VAULT = { name: "key", auth_type: "api_key", source: "vault", vault_ref: "payments/stripe#key" };
const MANAGED_SHAPE = { ...CREDENTIAL, masked_hint: is.text };
const VAULT_SHAPE = { ...CREDENTIAL, vault_ref: is.text };

/** Bodies of a create that are refused, by the field that the error must name. */
const WRONG: ReadonlyArray<readonly [string, Json, string]> = [
  ["no name", { ...MANAGED, name: undefined }, "name"],
  ["an empty name", { ...MANAGED, name: " " }, "name"],
  ["a long name", { ...MANAGED, name: "x".repeat(129) }, "name"],
  ["a name with a line break", { ...MANAGED, name: "a\nb" }, "name"],
  ["a number for name", { ...MANAGED, name: 5 }, "name"],
  ["no auth_type", { ...MANAGED, auth_type: undefined }, "auth_type"],
  ["an unknown auth_type", { ...MANAGED, auth_type: "basic" }, "auth_type"],
  ["null for auth_type", { ...MANAGED, auth_type: null }, "auth_type"],
  ["no source", { ...MANAGED, source: undefined }, "source"],
  ["an unknown source", { ...MANAGED, source: "file" }, "source"],
  ["managed without plaintext", { ...MANAGED, plaintext: undefined }, "plaintext"],
  ["managed with null plaintext", { ...MANAGED, plaintext: null }, "plaintext"],
  ["none without plaintext", { ...MANAGED, auth_type: "none", plaintext: undefined }, "plaintext"],
  ["an empty plaintext", { ...MANAGED, plaintext: "" }, "plaintext"],
  ["a plaintext over 64 KiB", { ...MANAGED, plaintext: "é".repeat(32_769) }, "plaintext"],
  ["a number for plaintext", { ...MANAGED, plaintext: 12345678 }, "plaintext"],
  ["managed with vault_ref", { ...MANAGED, vault_ref: "a#b" }, "vault_ref"],
  ["managed with vault_ref alone", { ...MANAGED, plaintext: undefined, vault_ref: "a#b" }, ""],
  ["vault without vault_ref", { ...VAULT, vault_ref: undefined }, "vault_ref"],
  ["vault with plaintext", { ...VAULT, plaintext: "x" }, "plaintext"],
  ["an empty vault_ref", { ...VAULT, vault_ref: "" }, "vault_ref"],
  ["a number for vault_ref", { ...VAULT, vault_ref: 1 }, "vault_ref"],
  ["a vault_ref that climbs", { ...VAULT, vault_ref: "../other/secret" }, "vault_ref"],
  ["a vault_ref that climbs in the middle", { ...VAULT, vault_ref: "a/../../b" }, "vault_ref"],
  ["an absolute vault_ref", { ...VAULT, vault_ref: "/etc/passwd" }, "vault_ref"],
  ["a vault_ref with an encoded climb", { ...VAULT, vault_ref: "%2e%2e/other" }, "vault_ref"],
  ["a vault_ref with a backslash", { ...VAULT, vault_ref: "..\\other" }, "vault_ref"],
  ["an id", { ...MANAGED, id: UNKNOWN_CREDENTIAL }, "id"],
  ["a version", { ...MANAGED, version: 3 }, "version"],
  ["an unknown key", { ...MANAGED, surprise: 1 }, "surprise"],
];

contract((at) => {
  describe("POST /v1/credentials", () => {
    test("a managed credential has its metadata and a hint, and no vault_ref", async () => {
      const tenant = at.tenant();
      const answer = await tenant.send("POST", "/v1/credentials", { json: { ...MANAGED, name: " key " } });
      expect(answer.status).toBe(201);
      expect(answer.headers.get("content-type")).toBe("application/json");
      expectRequestId(answer);
      expectShape(answer.body, MANAGED_SHAPE);
      const { id, created_at } = answer.body;
      expect(answer.body).toEqual({
        id,
        name: "key",
        auth_type: "bearer",
        source: "managed",
        masked_hint: "…orse",
        allowed_hosts: null,
        version: 1,
        created_at,
        updated_at: created_at,
      });
      expect((await tenant.send("GET", `/v1/credentials/${id}`)).body).toEqual(answer.body);
    });

    test("a vault credential has its reference and no hint", async () => {
      const tenant = at.tenant();
      const { status, body } = await tenant.send("POST", "/v1/credentials", { json: VAULT });
      expect(status).toBe(201);
      expectShape(body, VAULT_SHAPE);
      expect(body).toMatchObject({ ...VAULT, version: 1 });
    });

    test.each([
      ["123456789", "…6789"],
      ["12345678", "********"],
      ["x", "*"],
      ["ab🦆d", "****"],
      ["123456🦆🦆🦆", "…6🦆🦆🦆"],
    ])("the hint of %s is %s", async (plaintext, masked_hint) => {
      expect(await at.tenant().credential({ plaintext })).toMatchObject({ masked_hint });
    });

    test.each(["bearer", "api_key", "none"])(
      "a credential with %s and a plaintext of 65,536 bytes is taken",
      async (auth_type) => {
        const plaintext = "é".repeat(32_768);
        expect(await at.tenant().credential({ auth_type, plaintext })).toMatchObject({ auth_type });
      },
    );

    test.each(WRONG)("a credential with problems is refused: %s", async (_, json, field) => {
      const tenant = at.tenant();
      expectError(await tenant.send("POST", "/v1/credentials", { json }), 400, field);
      expect((await tenant.send("GET", "/v1/credentials")).body).toEqual({ credentials: [] });
    });

    test("a credential's name is unique within the tenant, and free in another", async () => {
      const tenant = at.tenant();
      await tenant.credential({ name: "taken" });
      for (const json of [
        { ...MANAGED, name: "taken" },
        { ...VAULT, name: " taken" },
      ]) {
        expectError(await tenant.send("POST", "/v1/credentials", { json }), 409);
      }
      await at.tenant().credential({ name: "taken" });
    });

    test("of concurrent creates under one name exactly one succeeds", async () => {
      const tenant = at.tenant();
      const answers = await Promise.all(
        Array.from({ length: 8 }, () => tenant.send("POST", "/v1/credentials", { json: MANAGED })),
      );
      expect(answers.map(({ status }) => status).sort()).toEqual([201, ...Array(7).fill(409)]);
    });
  });

  test("GET /v1/credentials lists all of the tenant's and only those", async () => {
    const tenant = at.tenant();
    await at.tenant().credential();
    const managed = await tenant.credential();
    const vault = (await tenant.send("POST", "/v1/credentials", { json: VAULT })).body;
    const { status, body } = await tenant.send("GET", "/v1/credentials");
    expect(status).toBe(200);
    expect(Object.keys(body)).toEqual(["credentials"]);
    const byId = (a: Json, b: Json) => a.id.localeCompare(b.id);
    expect(body.credentials.sort(byId)).toEqual([managed, vault].sort(byId));
  });

  describe("PUT /v1/credentials/{id}", () => {
    test("a rotation gives version + 1 and a new hint, and leaves everything else", async () => {
      const tenant = at.tenant();
      const made = await tenant.credential();
      const path = `/v1/credentials/${made.id}`;
      const { status, body } = await tenant.send("PUT", path, { json: { plaintext: "another secret" } });
      expect(status).toBe(200);
      expectShape(body, MANAGED_SHAPE);
      expect(body).toEqual({ ...made, version: 2, masked_hint: "…cret", updated_at: body.updated_at });
      expect((await tenant.send("GET", path)).body).toEqual(body);
      expect((await tenant.send("PUT", path, { json: { plaintext: "x" } })).body.version).toBe(3);
    });

    test("a vault reference is rotated", async () => {
      const tenant = at.tenant();
      const made = (await tenant.send("POST", "/v1/credentials", { json: VAULT })).body;
      const path = `/v1/credentials/${made.id}`;
      const { status, body } = await tenant.send("PUT", path, { json: { vault_ref: "other" } });
      expect(status).toBe(200);
      expectShape(body, VAULT_SHAPE);
      expect(body).toMatchObject({ version: 2, vault_ref: "other" });
    });

    test("concurrent rotations each raise the version", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.credential();
      const rotations = await Promise.all(
        Array.from({ length: 6 }, (_, i) =>
          tenant.send("PUT", `/v1/credentials/${id}`, { json: { plaintext: `secret ${i}` } }),
        ),
      );
      expect(rotations.map(({ body }) => body.version).sort()).toEqual([2, 3, 4, 5, 6, 7]);
    });

    test("a rotation that does not match the source is refused", async () => {
      const tenant = at.tenant();
      const managed = await tenant.credential();
      const vault = (await tenant.send("POST", "/v1/credentials", { json: VAULT })).body;
      const put = (id: string, json: unknown) => tenant.send("PUT", `/v1/credentials/${id}`, { json });
      expectError(await put(managed.id, {}), 400, "plaintext");
      expectError(await put(managed.id, { plaintext: "" }), 400, "plaintext");
      expectError(await put(managed.id, { plaintext: null }), 400, "plaintext");
      expectError(await put(managed.id, { vault_ref: "x" }), 400);
      expectError(await put(managed.id, { plaintext: "x", vault_ref: "x" }), 400, "vault_ref");
      expectError(await put(managed.id, { plaintext: "x", name: "y" }), 400, "name");
      expectError(await put(vault.id, { plaintext: "x" }), 400);
      expectError(await put(vault.id, { vault_ref: "../x" }), 400, "vault_ref");
      expect((await tenant.send("GET", `/v1/credentials/${managed.id}`)).body).toEqual(managed);
    });
  });

  describe("DELETE /v1/credentials/{id}", () => {
    test("a deletion is 204, then the credential is unknown and its name is free", async () => {
      const tenant = at.tenant();
      const { id, name } = await tenant.credential();
      expectNoBody(await tenant.send("DELETE", `/v1/credentials/${id}`), 204);
      expectError(await tenant.send("GET", `/v1/credentials/${id}`), 404);
      expectError(await tenant.send("PUT", `/v1/credentials/${id}`, { json: { plaintext: "x" } }), 404);
      expectError(await tenant.send("DELETE", `/v1/credentials/${id}`), 404);
      expect((await tenant.send("GET", "/v1/credentials")).body).toEqual({ credentials: [] });
      const json = { name: "agent", credential_ref: id };
      expectError(await tenant.send("POST", "/v1/agents", { json }), 400, "credential_ref");
      expect((await tenant.credential({ name })).id).not.toBe(id);
    });

    test("a deletion is 409 while a live agent names the credential", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.credential();
      const one = await tenant.agent({ credential_ref: id });
      const two = await tenant.agent({ credential_ref: id, upstream_url: null });
      expectError(await tenant.send("DELETE", `/v1/credentials/${id}`), 409);
      await tenant.send("DELETE", `/v1/agents/${one.id}`);
      expectError(await tenant.send("DELETE", `/v1/credentials/${id}`), 409);
      await tenant.patch(two.id, { credential_ref: null });
      expectNoBody(await tenant.send("DELETE", `/v1/credentials/${id}`), 204);
    });
  });

  test.each([UNKNOWN_CREDENTIAL, "cred_x", "x", "%00"])("%s is an unknown credential", async (id) => {
    const tenant = at.tenant();
    const path = `/v1/credentials/${id}`;
    expectError(await tenant.send("GET", path), 404);
    expectError(await tenant.send("PUT", path, { json: { plaintext: "x" } }), 404);
    expectError(await tenant.send("DELETE", path), 404);
  });
});
