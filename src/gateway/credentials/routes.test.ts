import { describe, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fresh, outcome, useCatalog } from "../../../test/support/stores/catalog.ts";
import { findSecret, secretIdentity } from "./service.ts";

const { catalog, send } = useCatalog();
const create = (body: object, tenant?: string) => send("POST", "/v1/credentials", body, tenant);

const UNKNOWN = "cred_019aa4d2-7c1e-7b54-9d0f-3f0b6c1d2e3f";
const managed = (fields: object = {}) =>
  fresh({ auth_type: "bearer", source: "managed", plaintext: "plain-secret-text", ...fields });
const vault = (fields: object = {}) =>
  fresh({ auth_type: "api_key", source: "vault", vault_ref: "app/key#token", ...fields });

async function made(body: object = managed(), tenant?: string) {
  const answer = await create(body, tenant);
  expect(outcome(answer)).toEqual([201, undefined]);
  return answer.body;
}

/** The secret as it is stored, opened. */
async function stored(id: string) {
  const row = await findSecret(catalog().store.read, "acme", id);
  if (row?.sealed == null) throw new Error("no sealed secret");
  const identity = secretIdentity("acme", id, row.version);
  return (
    await catalog().keyring.openSecret("acme", identity, { sealed: row.sealed, key_number: row.key_number })
  ).toString();
}

describe("creating a credential", () => {
  test("a managed credential shows a hint and nothing else of its secret", async () => {
    const body = await made({ ...managed(), name: "  spaced " });
    expect(body).toEqual({
      id: expect.stringMatching(/^cred_[0-9a-f]{8}-[0-9a-f]{4}-7/),
      name: "spaced",
      allowed_hosts: null,
      auth_type: "bearer",
      source: "managed",
      masked_hint: "…text",
      version: 1,
      created_at: expect.stringMatching(/^2026-\d\d-\d\dT.*Z$/),
      updated_at: body.created_at,
    });
    expect((await send("GET", `/v1/credentials/${body.id}`)).body).toEqual(body);
    expect(await stored(body.id)).toBe("plain-secret-text");
  });

  test("a vault credential shows its reference and no hint", async () => {
    const body = await made(vault());
    expect(body).toMatchObject({ source: "vault", vault_ref: "app/key#token", version: 1 });
    expect(body).not.toHaveProperty("masked_hint");
    expect((await send("GET", `/v1/credentials/${body.id}`)).body).toEqual(body);
  });

  const PEM = `-----BEGIN CERTIFICATE-----\n${"A".repeat(64)}\n-----END CERTIFICATE-----\n`;
  test.each([
    ["a PEM bundle", PEM, "…---\n"],
    ["65,536 bytes", "é".repeat(32_768), "…éééé"],
    ["one character", "x", "*"],
    ["eight characters", "\u{1f99c}".repeat(8), "********"],
    ["nine characters", "12345678\u{1f99c}", "…678\u{1f99c}"],
    ["U+0000 at its end", "123456789\0", "…789*"],
  ])("the largest secret is taken, of %s, whatever the auth_type", async (_what, plaintext, masked_hint) => {
    for (const auth_type of ["bearer", "api_key", "none"]) {
      const body = await made(managed({ auth_type, plaintext }));
      expect(body.masked_hint).toBe(masked_hint);
      expect(await stored(body.id)).toBe(plaintext);
    }
  });

  const refused: [string, object | string, string][] = [
    ["no name", { ...managed(), name: undefined }, "name: required"],
    ["a blank name", { ...managed(), name: " " }, "name: must not be empty"],
    ["a long name", { ...managed(), name: "x".repeat(129) }, "name: must be at most 128 characters"],
    ["U+0000 in the name", { ...managed(), name: "\0" }, "name: must not contain U+0000"],
    ["no auth_type", managed({ auth_type: undefined }), "auth_type: required"],
    ["another auth_type", managed({ auth_type: "basic" }), "auth_type: must be bearer, api_key or none"],
    ["no source", managed({ source: undefined }), "source: required"],
    ["another source", managed({ source: "file" }), "source: must be managed or vault"],
    ["a null source", managed({ source: null }), "source: must be managed or vault"],
    ["managed without a secret", managed({ plaintext: undefined }), "plaintext: required when source is managed"],
    [
      "managed of auth_type none without a secret",
      managed({ auth_type: "none", plaintext: undefined }),
      "plaintext: required when source is managed",
    ],
    ["managed with a reference", managed({ vault_ref: "a" }), "vault_ref: not possible when source is managed"],
    ["vault without a reference", vault({ vault_ref: undefined }), "vault_ref: required when source is vault"],
    ["vault with a secret", vault({ plaintext: "x" }), "plaintext: not possible when source is vault"],
    ["an empty secret", managed({ plaintext: "" }), "plaintext: must be 1 to 65536 bytes"],
    ["a secret too long", managed({ plaintext: `${"é".repeat(32_768)}x` }), "plaintext: must be 1 to 65536 bytes"],
    ["a lone surrogate", managed({ plaintext: "\ud800" }), "plaintext: must not contain lone surrogates"],
    ["a secret that is no text", managed({ plaintext: { a: 1 } }), "plaintext: must be a string"],
    ["an unknown key", managed({ version: 7 }), "version: is read-only"],
    [
      "a reference out of the prefix",
      vault({ vault_ref: "../other/key" }),
      "vault_ref: must be a path of plain names below the tenant's own prefix",
    ],
    ["a reference without its key", vault({ vault_ref: "a#" }), "vault_ref: must name one key after #"],
    ["a key twice", '{"plaintext":"a","plaintext":"b"}', "plaintext: given twice"],
  ];
  test.each(refused)("a credential with problems is refused: %s", async (_what, body, error) => {
    expect(outcome(await send("POST", "/v1/credentials", body))).toEqual([400, error]);
  });

  test("of concurrent creates of one name exactly one succeeds", async () => {
    const answers = await Promise.all(Array.from({ length: 20 }, () => create({ ...managed(), name: "contested" })));
    expect(answers.filter(({ status }) => status === 201)).toHaveLength(1);
    const conflicts = answers.filter(({ status }) => status === 409);
    expect(conflicts).toHaveLength(19);
    expect(conflicts[0]?.body).toEqual({ error: "name: already used by another credential" });
    expect((await create({ ...managed(), name: "contested" }, "other")).status).toBe(201);
  });
});

describe("the list of credentials", () => {
  test("the list has all of the tenant, newest first, and no other tenant's", async () => {
    const first = await made(managed(), "lister");
    const second = await made(vault(), "lister");
    const { status, body } = await send("GET", "/v1/credentials", undefined, "lister");
    expect([status, body]).toEqual([200, { credentials: [second, first] }]);
    expect((await send("GET", "/v1/credentials", undefined, "nobody")).body).toEqual({ credentials: [] });
  });
});

describe("rotating a credential", () => {
  const rotate = (id: string, body: unknown) => send("PUT", `/v1/credentials/${id}`, body);

  test("a managed secret becomes the next version", async () => {
    const before = await made();
    const { status, body } = await rotate(before.id, { plaintext: "another-secret" });
    expect([status, body]).toEqual([200, { ...before, masked_hint: "…cret", version: 2, updated_at: body.updated_at }]);
    expect(body.updated_at > before.updated_at).toBe(true);
    expect(await stored(before.id)).toBe("another-secret");
  });

  test("a reference becomes the next version", async () => {
    const before = await made(vault());
    const { body } = await rotate(before.id, { vault_ref: "app/other" });
    expect(body).toEqual({ ...before, vault_ref: "app/other", version: 2, updated_at: body.updated_at });
  });

  test("a rotation must match the source of its credential", async () => {
    const kept = await made();
    const referring = await made(vault());
    const answers = [
      await rotate(kept.id, {}),
      await rotate(kept.id, { vault_ref: "a" }),
      await rotate(kept.id, { plaintext: "x", vault_ref: "a" }),
      await rotate(kept.id, { plaintext: "" }),
      await rotate(kept.id, { plaintext: "x", name: "y" }),
      await rotate(referring.id, { plaintext: "x" }),
      await rotate(referring.id, { vault_ref: "/etc/passwd" }),
    ];
    expect(answers.map(outcome)).toEqual([
      [400, "plaintext: required when source is managed"],
      [400, "vault_ref: not possible when source is managed"],
      [400, "vault_ref: not possible when source is managed"],
      [400, "plaintext: must be 1 to 65536 bytes"],
      [400, "name: is read-only"],
      [400, "plaintext: not possible when source is vault"],
      [400, "vault_ref: must be a path of plain names below the tenant's own prefix"],
    ]);
    expect((await send("GET", `/v1/credentials/${kept.id}`)).body).toEqual(kept);
  });

  test("concurrent rotations each make one version, and the last one's secret is what opens", async () => {
    const { id } = await made();
    const secrets = Array.from({ length: 10 }, (_, index) => `secret number ${index}`);
    const answers = await Promise.all(secrets.map((plaintext) => rotate(id, { plaintext })));
    expect(answers.map(({ body }) => body.version).sort((a, b) => a - b)).toEqual([2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    const last = answers.findIndex(({ body }) => body.version === 11);
    expect(await stored(id)).toBe(secrets[last] ?? "");
  });
});

describe("deleting a credential", () => {
  const remove = (id: string) => send("DELETE", `/v1/credentials/${id}`);

  test("a deleted credential is gone and its name is free", async () => {
    const { id, name } = await made();
    expect(await remove(id)).toEqual({ status: 204, text: "", body: undefined });
    expect(outcome(await send("GET", `/v1/credentials/${id}`))).toEqual([404, "no such credential"]);
    expect((await remove(id)).status).toBe(404);
    expect((await create({ ...managed(), name })).status).toBe(201);
  });

  test("a credential is not deleted while a live agent names it", async () => {
    const { id } = await made();
    const agent = (await send("POST", "/v1/agents", fresh({ credential_ref: id }))).body;
    expect(agent.credential_ref).toBe(id);
    expect(outcome(await remove(id))).toEqual([
      409,
      `the credential is in use by the agent "${agent.name}" (${agent.id})`,
    ]);
    await send("PATCH", `/v1/agents/${agent.id}`, { credential_ref: null });
    await send("PATCH", `/v1/agents/${agent.id}`, { credential_ref: id });
    expect((await remove(id)).status).toBe(409);
    await send("DELETE", `/v1/agents/${agent.id}`);
    expect((await remove(id)).status).toBe(204);
  });

  test("a deletion, and an agent that begins to name the credential, can't both succeed", async () => {
    for (let round = 0; round < 20; round++) {
      const { id } = await made();
      const [agent, removed] = await Promise.all([
        send("POST", "/v1/agents", fresh({ credential_ref: id })),
        remove(id),
      ]);
      expect([
        [201, 409],
        [400, 204],
      ]).toContainEqual([agent.status, removed.status]);
    }
  });

  test("a tenant can't name another tenant's credential", async () => {
    const { id } = await made();
    const answer = await send("POST", "/v1/agents", fresh({ credential_ref: id }), "other");
    expect(outcome(answer)).toEqual([400, "credential_ref: names no credential of this tenant"]);
  });
});

test("another tenant's credential is answered byte for byte like an unknown ID, and a malformed one is told where IDs are", async () => {
  const { id } = await made(managed(), "other");
  const answers = async (path: string) => [
    await send("GET", `/v1/credentials/${path}`),
    await send("PUT", `/v1/credentials/${path}`, { plaintext: "x" }),
    await send("PUT", `/v1/credentials/${path}`, { vault_ref: "x" }),
    await send("DELETE", `/v1/credentials/${path}`),
  ];
  const unknown = await answers(UNKNOWN);
  expect(unknown.map(outcome)).toEqual(Array(4).fill([404, "no such credential"]));
  expect(await answers(id)).toEqual(unknown);
  const malformed = "no such credential: use its ID (cred_…), not its name; GET /v1/credentials lists them";
  for (const path of ["x", "cred_", "%00", "cred_%00", id.toUpperCase()]) {
    expect((await answers(path)).map(outcome)).toEqual(Array(4).fill([404, malformed]));
  }
  expect((await send("GET", `/v1/credentials/${id}`, undefined, "other")).body.version).toBe(1);
});

test("a secret is in no answer, no log line and no byte of the database", async () => {
  const secrets = ["sentinel-one-7f3a9c", "sentinel-two-5be1d0", "sentinel-bad-90ac41"];
  const [first, second, bad] = secrets;
  const texts: string[] = [];
  const record = async (...parts: Parameters<typeof send>) => {
    const answer = await send(...parts);
    texts.push(answer.text);
    return answer;
  };
  const { body } = await record("POST", "/v1/credentials", managed({ plaintext: first }));
  const path = `/v1/credentials/${body.id}`;
  await record("PUT", path, { plaintext: second });
  await record("GET", path);
  await record("GET", "/v1/credentials");
  for (const plaintext of [[bad], { [`${bad}`]: 1 }, `${bad}\ud800`, `${bad}${"x".repeat(65_536)}`]) {
    expect((await record("POST", "/v1/credentials", managed({ plaintext }))).status).toBe(400);
    expect((await record("PUT", path, { plaintext })).status).toBe(400);
  }
  // The name is taken, the body breaks off, the number is too large to be one.
  expect((await record("POST", "/v1/credentials", managed({ name: body.name, plaintext: bad }))).status).toBe(409);
  expect((await record("POST", "/v1/credentials", `{"plaintext":"${bad}`)).status).toBe(400);
  expect((await record("POST", "/v1/credentials", '{"plaintext":90414190414190414190}')).status).toBe(400);
  await record("POST", "/v1/agents", fresh({ credential_ref: body.id }));
  expect((await record("DELETE", path)).status).toBe(409);

  const files = readdirSync(catalog().dir).map((name) => join(catalog().dir, name));
  expect(files.some((name) => name.endsWith("-wal"))).toBe(true);
  const bytes = Buffer.concat([
    ...files.map((name) => readFileSync(name)),
    Buffer.from(texts.join("\n")),
    Buffer.from(catalog().log.join("\n")),
  ]);
  // What is looked for can be found at all.
  expect([bytes.includes(body.id), bytes.includes(body.name)]).toEqual([true, true]);
  for (const secret of [...secrets, "90414190414190414190"]) {
    for (const form of [secret, Buffer.from(secret).toString("base64").slice(0, -4)]) {
      expect(bytes.includes(form)).toBe(false);
    }
    expect(bytes.includes(Buffer.from(secret, "utf16le"))).toBe(false);
  }
});
