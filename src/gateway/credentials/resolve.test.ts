import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { mkdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { eq } from "drizzle-orm";
import { type Catalog, fresh, openCatalog } from "../../../test/support/stores/catalog.ts";
import { createOutbound, fetchJson, type JsonLimits } from "../../http/client/outbound.ts";
import { CredentialFailure } from "../upstream/failure.ts";
import { createSecrets, type ResolverDeps } from "./resolve.ts";

let catalog: Catalog;
beforeAll(async () => {
  catalog = await openCatalog();
});
afterAll(() => catalog[Symbol.asyncDispose]());

const trusted = createOutbound({ rules: null, extraCa: null });
let asked: JsonLimits[] = [];
let time = 0;

const URL_ = "https://api.example.com/run";

function resolver(deps: Partial<ResolverDeps> = {}, timeoutMs = 5_000) {
  asked = [];
  const { resolve } = createSecrets({
    store: catalog.store,
    keyring: catalog.keyring,
    secretsDir: null,
    vault: null,
    fetchJson: (url, headers, limits) => {
      asked.push(limits);
      return fetchJson(trusted, url, headers, { ...limits, timeoutMs });
    },
    now: () => time,
    ...deps,
  });
  return (tenant: string, id: string, url = URL_) => resolve(tenant, id, url);
}

async function made(fields: object, tenant?: string): Promise<string> {
  const body = fresh({ auth_type: "bearer", source: "vault", ...fields });
  const answer = await catalog.send("POST", "/v1/credentials", body, tenant);
  expect(answer.status).toBe(201);
  return answer.body.id;
}

const rotate = (id: string, body: object) => catalog.send("PUT", `/v1/credentials/${id}`, body);

/** The message of the failure that resolving ends in. */
async function failure(resolving: Promise<unknown>): Promise<string> {
  const error = await resolving.then(
    () => new Error("it did resolve"),
    (thrown: unknown) => thrown,
  );
  if (error instanceof CredentialFailure) return error.message;
  throw error;
}

const value = async (resolving: ReturnType<ReturnType<typeof resolver>>) => (await resolving).header?.value;

describe("a managed credential", () => {
  const managed = (fields: object) => made({ source: "managed", plaintext: "s3cret-text", ...fields });

  test("becomes the header of its auth_type", async () => {
    const resolve = resolver();
    const headers = [];
    for (const auth_type of ["bearer", "api_key", "none"]) {
      headers.push((await resolve("acme", await managed({ auth_type }))).header);
    }
    expect(headers).toEqual([
      { name: "authorization", value: "Bearer s3cret-text" },
      { name: "x-api-key", value: "s3cret-text" },
      null,
    ]);
  });

  test("is another one after a rotation, and none after its deletion", async () => {
    const resolve = resolver();
    const id = await managed({});
    const before = await resolve("acme", id);
    expect(await resolve("acme", id)).toEqual(before);
    await rotate(id, { plaintext: "other-text" });
    const after = await resolve("acme", id);
    expect([after.header?.value, after.version === before.version]).toEqual(["Bearer other-text", false]);
    await catalog.send("DELETE", `/v1/credentials/${id}`);
    expect(await failure(resolve("acme", id))).toBe("no such credential");
  });

  test("is none when it is another tenant's, or of no form", async () => {
    const resolve = resolver();
    const id = await managed({});
    for (const [tenant, ref] of [
      ["other", id],
      ["acme", "x"],
      ["acme", "cred_\0"],
    ] as const) {
      expect(await failure(resolve(tenant, ref))).toBe("no such credential");
    }
  });

  test.each(["two\nlines", "-----BEGIN CERTIFICATE-----\nA\n", "ключ", "a\0b", "ends in a blank "])(
    "fails as %j, which no header can carry, unless nothing is sent",
    async (plaintext) => {
      const resolve = resolver();
      expect(await failure(resolve("acme", await managed({ plaintext })))).toStartWith(
        "the secret can't be sent as a header",
      );
      expect(await resolve("acme", await managed({ plaintext, auth_type: "none" }))).toEqual({
        header: null,
        version: "1",
      });
    },
  );

  test("does not open as another credential or version", async () => {
    const [first, second] = [await managed({}), await managed({})];
    const copy = (columns: object) =>
      catalog.store.write((tx) => {
        const { credentials } = tx.tables;
        return tx.db.update(credentials).set(columns).where(eq(credentials.id, second));
      });
    const rows = await catalog.store.read.db
      .select({ sealed: catalog.store.read.tables.credentials.sealed })
      .from(catalog.store.read.tables.credentials)
      .where(eq(catalog.store.read.tables.credentials.id, first));
    const resolve = resolver();
    await copy({ version: 2 });
    expect(await failure(resolve("acme", second))).toBe("the stored secret can't be decrypted");
    await copy({ version: 1, sealed: rows[0]?.sealed });
    expect(await failure(resolve("acme", second))).toBe("the stored secret can't be decrypted");
  });
});

describe("a vault credential from the secrets directory", () => {
  let dir: string;
  let home: string;
  beforeEach(() => {
    dir = join(catalog.dir, `secrets-${crypto.randomUUID()}`);
    home = join(dir, "acme");
    mkdirSync(join(home, "app"), { recursive: true });
  });
  afterEach(() => rmSync(dir, { recursive: true }));

  const resolve = async (vault_ref: string) => {
    const id = await made({ vault_ref });
    return resolver({ secretsDir: dir })("acme", id);
  };

  test.each([
    ["whole", "secret", "secret"],
    ["less one newline", "secret\n", "secret"],
    ["less one Windows newline", "secret\r\n", "secret"],
  ])("is the file's text, %s", async (_what, content, expected) => {
    writeFileSync(join(home, "app", "key"), content);
    expect(await value(resolve("app/key"))).toBe(`Bearer ${expected}`);
  });

  test("is a field of a JSON file when the reference names one", async () => {
    writeFileSync(join(home, "app", "keys.json"), JSON.stringify({ "a/b": "one", value: "two", n: 1 }));
    expect(await value(resolve("app/keys.json#a/b"))).toBe("Bearer one");
    expect(await value(resolve("app/keys.json#value"))).toBe("Bearer two");
    for (const key of ["n", "toString", "none"]) {
      expect(await failure(resolve(`app/keys.json#${key}`))).toStartWith("a secret has no text under the key");
    }
  });

  test("may lie behind links that stay in the tenant's folder, as container mounts lay them out", async () => {
    mkdirSync(join(home, "..2026"));
    writeFileSync(join(home, "..2026", "key"), "linked");
    symlinkSync("..2026", join(home, "..data"));
    symlinkSync("..data/key", join(home, "key"));
    expect(await value(resolve("key"))).toBe("Bearer linked");
  });

  test("never lies outside the tenant's folder", async () => {
    mkdirSync(join(dir, "acme-other"));
    writeFileSync(join(dir, "acme-other", "key"), "stolen");
    symlinkSync("../acme-other/key", join(home, "file"));
    symlinkSync("../acme-other", join(home, "folder"));
    symlinkSync("/etc", join(home, "etc"));
    symlinkSync(".", join(home, "self"));
    for (const ref of ["file", "folder/key", "etc/passwd", "self"]) {
      expect(await failure(resolve(ref))).toBe("a secret's file is outside the tenant's folder");
    }
  });

  test("fails when there is something else than a small text file", async () => {
    mkdirSync(join(home, "folder"));
    writeFileSync(join(home, "large"), "x".repeat(65_539));
    writeFileSync(join(home, "binary"), Uint8Array.of(0xff, 0xfe));
    writeFileSync(join(home, "text"), "no JSON");
    writeFileSync(join(home, "empty"), "\n");
    symlinkSync("loop", join(home, "loop"));
    expect(Bun.spawnSync(["mkfifo", join(home, "pipe")]).exitCode).toBe(0);
    const failures = [];
    for (const ref of ["folder", "large", "binary", "text#key", "pipe", "loop", "empty", "absent", "text/x"]) {
      failures.push(await failure(resolve(ref)));
    }
    expect(failures).toEqual([
      "a secret's file is not a regular file",
      "a secret's file is too large",
      "a secret's file can't be read",
      "a secret's file is not JSON, but its reference names a key",
      "a secret's file is not a regular file",
      "a secret's path can't be resolved",
      "the secret can't be sent as a header: it is empty or not visible ASCII",
      "no secrets store holds the secret",
      "no secrets store holds the secret",
    ]);
  });

  test.each(["..", ".", "a/b", "%2e%2e", "a\\b"])("is nothing for a tenant named %j", async (tenant) => {
    writeFileSync(join(home, "key"), "secret");
    const id = await made({ vault_ref: "acme/key" }, tenant);
    expect(await failure(resolver({ secretsDir: dir })(tenant, id))).toBe(
      "the tenant's name or the reference is not a safe path",
    );
  });

  test("reads a large secret whole, of 65,536 bytes and its newline", async () => {
    writeFileSync(join(home, "key"), `${"x".repeat(65_536)}\n`);
    expect((await value(resolve("key")))?.length).toBe("Bearer ".length + 65_536);
  });
});

describe("a vault credential from a stand-in for the KV version 2 interface", () => {
  const requests: { path: string; token: string | null }[] = [];
  let answer: () => Response | Promise<Response>;
  let server: Bun.Server<undefined>;
  beforeAll(() => {
    server = Bun.serve({
      port: 0,
      hostname: "127.0.0.1",
      fetch(request) {
        const { pathname } = new URL(request.url);
        requests.push({ path: pathname, token: request.headers.get("x-vault-token") });
        return answer();
      },
    });
  });
  afterAll(() => server.stop(true));
  beforeEach(() => {
    time = 0;
    requests.length = 0;
    answer = () => secret({ value: "from-vault", other: "o", number: 5 });
  });

  const secret = (data: object | null) =>
    Response.json({
      request_id: "2c2e5a5e",
      lease_id: "",
      renewable: false,
      data: { data, metadata: { version: 3, destroyed: false, deletion_time: "" } },
      warnings: null,
    });
  const vault = (fields: object = {}) => ({
    address: `http://127.0.0.1:${server.port}/`,
    prefix: "secret/data/tenants/{tenant}",
    token: "root",
    tokenFile: null,
    ...fields,
  });

  test("is asked below the tenant's prefix, with the token and within limits", async () => {
    const resolve = resolver({ vault: vault() });
    expect(await value(resolve("acme", await made({ vault_ref: "a b/ü" })))).toBe("Bearer from-vault");
    expect(await value(resolve("acme", await made({ vault_ref: "app#other" })))).toBe("Bearer o");
    const tenant = "tenant one";
    expect(await value(resolve(tenant, await made({ vault_ref: "app" }, tenant)))).toBe("Bearer from-vault");
    expect(requests).toEqual([
      { path: "/v1/secret/data/tenants/acme/a%20b/%C3%BC", token: "root" },
      { path: "/v1/secret/data/tenants/acme/app", token: "root" },
      { path: "/v1/secret/data/tenants/tenant%20one/app", token: "root" },
    ]);
    expect(asked).toEqual(Array(3).fill({ timeoutMs: 5_000, bytesMax: 65_536 }));
  });

  test("reads its token anew from the file for each request", async () => {
    const tokenFile = join(catalog.dir, "vault-token");
    writeFileSync(tokenFile, "first\n");
    const resolve = resolver({ vault: vault({ tokenFile }) });
    await resolve("acme", await made({ vault_ref: "a" }));
    writeFileSync(tokenFile, "second\n");
    await resolve("acme", await made({ vault_ref: "a" }));
    expect(requests.map(({ token }) => token)).toEqual(["first", "second"]);
    rmSync(tokenFile);
    expect(await failure(resolve("acme", await made({ vault_ref: "a" })))).toBe("a secret's file can't be read");
  });

  test("is asked only after the secrets directory", async () => {
    const dir = join(catalog.dir, "secrets");
    mkdirSync(join(dir, "acme"), { recursive: true });
    writeFileSync(join(dir, "acme", "here"), "from-file");
    writeFileSync(join(dir, "acme", "bad"), "no JSON");
    const resolve = resolver({ secretsDir: dir, vault: vault() });
    expect(await value(resolve("acme", await made({ vault_ref: "here" })))).toBe("Bearer from-file");
    expect(await failure(resolve("acme", await made({ vault_ref: "bad#k" })))).toStartWith("a secret's file");
    expect(requests).toEqual([]);
    expect(await value(resolve("acme", await made({ vault_ref: "there" })))).toBe("Bearer from-vault");
  });

  const failures: [string, () => Response | Promise<Response>, string][] = [
    ["no such secret", () => Response.json({ errors: [] }, { status: 404 }), "no secrets store holds the secret"],
    ["a refused token", () => Response.json({ errors: ["x"] }, { status: 403 }), "vault answered 403"],
    ["a sealed vault", () => Response.json({ errors: ["sealed"] }, { status: 503 }), "vault answered 503"],
    ["a redirect", () => Response.redirect("http://127.0.0.1:9/"), "vault answered 302"],
    ["a deleted version", () => secret(null), "a secret has no text under the key that its reference names"],
    ["another key", () => secret({ k: "v" }), "a secret has no text under the key that its reference names"],
    ["no text", () => secret({ value: { a: 1 } }), "a secret has no text under the key that its reference names"],
    ["no JSON", () => new Response("<html>"), "a secret has no text under the key that its reference names"],
    ["a huge answer", () => secret({ value: "x".repeat(65_536) }), "vault gave no answer"],
    ["an answer in time of none", () => new Promise<Response>(() => {}), "vault gave no answer"],
  ];
  test.each(failures)("fails on %s", async (_what, respond, message) => {
    answer = respond;
    const id = await made({ vault_ref: "app" });
    expect(await failure(resolver({ vault: vault() }, 300)("acme", id))).toBe(message);
  });

  test("is asked once by all who wait, and again after a minute at most", async () => {
    const resolve = resolver({ vault: vault() });
    const id = await made({ vault_ref: "app" });
    const all = await Promise.all(Array.from({ length: 50 }, () => resolve("acme", id)));
    expect(new Set(all.map(({ header }) => header?.value))).toEqual(new Set(["Bearer from-vault"]));
    time = 59_999;
    await resolve("acme", id);
    expect(requests).toHaveLength(1);
    answer = () => secret({ value: "renewed" });
    time = 60_000;
    const renewed = await resolve("acme", id);
    expect(renewed.header?.value).toBe("Bearer renewed");
    expect(renewed.version).not.toBe(all[0]?.version ?? "");
    expect(requests).toHaveLength(2);
  });

  test("keeps a failure for a second only", async () => {
    const resolve = resolver({ vault: vault() });
    const id = await made({ vault_ref: "app" });
    answer = () => Response.json({}, { status: 500 });
    const outcomes = await Promise.all(Array.from({ length: 50 }, () => failure(resolve("acme", id))));
    expect(new Set(outcomes)).toEqual(new Set(["vault answered 500"]));
    time = 999;
    await failure(resolve("acme", id));
    expect(requests).toHaveLength(1);
    answer = () => secret({ value: "back" });
    time = 1_000;
    expect(await value(resolve("acme", id))).toBe("Bearer back");
  });

  test("is another one at once after a rotation, and none after a deletion", async () => {
    const resolve = resolver({ vault: vault() });
    const id = await made({ vault_ref: "app" });
    await resolve("acme", id);
    await rotate(id, { vault_ref: "app#other" });
    expect(await value(resolve("acme", id))).toBe("Bearer o");
    await catalog.send("DELETE", `/v1/credentials/${id}`);
    expect(await failure(resolve("acme", id))).toBe("no such credential");
  });
});

test("a vault credential of which no store is configured fails", async () => {
  expect(await failure(resolver()("acme", await made({ vault_ref: "app" })))).toBe("no secrets store holds the secret");
});

test("an error shows no part of a secret", async () => {
  const dir = join(catalog.dir, "leaks");
  mkdirSync(join(dir, "acme"), { recursive: true });
  writeFileSync(join(dir, "acme", "json"), '{"value": sentinel-5f1c}');
  const ids = [
    await made({ source: "managed", plaintext: "sentinel-5f1c\n" }),
    await made({ vault_ref: "json#value" }),
  ];
  for (const id of ids) {
    const error = await resolver({ secretsDir: dir })("acme", id).catch((thrown: unknown) => thrown);
    expect(error).toBeInstanceOf(CredentialFailure);
    expect(Bun.inspect(error, { depth: 10 })).not.toContain("sentinel-5f1c");
  }
});
