// Input that is wrong in form, size or manner: each gets a clear error, and the process serves on, in bounded
// memory.
import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { contract, expectError, expectShape, is, type Json, MCP, type Tenant, UNKNOWN_AGENT } from "./contract.ts";
import { connect, exchange, isWhole, parseAnswer, type WireAnswer } from "./wire.ts";

const MIB = 1024 * 1024;
const JSON_TYPE = { "content-type": "application/json" };

/** Every route that takes a JSON body; `{id}` is an agent's, `{cred}` a credential's. */
const JSON_ROUTES: ReadonlyArray<readonly [method: string, path: string]> = [
  ["POST", "/v1/agents"],
  ["PATCH", "/v1/agents/{id}"],
  ["POST", "/v1/credentials"],
  ["PUT", "/v1/credentials/{cred}"],
];

const BAD_JSON: ReadonlyArray<readonly [string, string]> = [
  ["nothing", ""],
  ["blanks", " \n"],
  ["an open object", '{"name":'],
  ["a trailing comma", '{"name":"a",}'],
  ["single quotes", "{'name':'a'}"],
  ["a comment", '{"name":"a"/**/}'],
  ["two values", '{"name":"a"}{}'],
  ["NaN", '{"name":NaN}'],
  ["a byte order mark only", "\ufeff"],
  ["a raw control character in a string", '{"name":"a\nb"}'],
  ["a bad escape", '{"name":"\\x"}'],
  ["a form", "name=a"],
  ["XML", "<name>a</name>"],
  ["a top-level array", '[{"name":"a"}]'],
  ["a top-level string", '"name"'],
  ["null", "null"],
  ["deep arrays", `{"name":${"[".repeat(100_000)}`],
  ["deep objects", `${'{"a":'.repeat(50_000)}1${"}".repeat(50_000)}`],
  ["deep but whole metadata", `{"name":"a","metadata":{"a":${"[".repeat(500)}${"]".repeat(500)}}}`],
  ["a huge integer", '{"name":"a","metadata":{"n":123456789012345678901234567890}}'],
  ["an infinite number", '{"name":"a","invocation_burst":1e999}'],
  ["a duplicate key", '{"name":"a","name":"b"}'],
  ["a duplicate key, escaped", '{"name":"a","n\\u0061me":"b"}'],
  ["a duplicate key inside", '{"name":"a","pricing":{"amount":"1","amount":"2"}}'],
  ["__proto__", '{"name":"a","__proto__":{"x":1}}'],
  ["constructor", '{"name":"a","constructor":{"prototype":{}}}'],
];

/** Types that no field of any request takes as its value's place: each field is tried with each. */
const STRANGE: readonly unknown[] = [1e308, -0.5, [[]], { a: 1 }, [null]];

contract((at) => {
  async function paths(tenant: Tenant) {
    const [{ id }, { id: cred }] = [await tenant.agent(), await tenant.credential()];
    return (path: string) => path.replace("{id}", id).replace("{cred}", cred);
  }

  const rss = () =>
    Number(/VmRSS:\s+(\d+) kB/.exec(readFileSync(`/proc/${at.gateway.pid}/status`, "utf8"))?.[1]) / 1024;
  const alive = async () => expect((await fetch(`${at.gateway.url}/readyz`)).status).toBe(200);

  const head = async (tenant: Tenant, line: string, ...headers: string[]) =>
    `${[`${line} HTTP/1.1`, "Host: gateway", `Authorization: Bearer ${await tenant.token()}`, ...headers].join("\r\n")}\r\n\r\n`;

  function expectWireError({ status, head: answer, body }: WireAnswer, expected: number, error = ""): void {
    expect([status, body]).toEqual([expected, expect.stringContaining(error)]);
    expectShape(JSON.parse(body), { error: is.text });
    expect(answer).toMatch(/^content-type: application\/json\r?$/im);
    expect(answer).toMatch(/^x-request-id: [A-Za-z0-9._-]+\r?$/im);
  }

  describe.each(JSON_ROUTES)("%s %s", (method, path) => {
    test("refuses every kind of malformed JSON", async () => {
      const tenant = at.tenant();
      const place = (await paths(tenant))(path);
      for (const [name, body] of BAD_JSON) {
        const answer = await tenant.send(method, place, { body, headers: JSON_TYPE });
        expect([name, answer.status]).toEqual([name, 400]);
        expectError(answer, 400);
      }
    });

    test("refuses invalid UTF-8, also where it would be lost in a replacement character", async () => {
      const tenant = at.tenant();
      const place = (await paths(tenant))(path);
      for (const bytes of [[0xff], [0xc3, 0x28], [0xed, 0xa0, 0x80], [0xc0, 0xaf], [0xf4, 0x90, 0x80, 0x80]]) {
        const body = Buffer.concat([Buffer.from('{"name":"a'), Uint8Array.from(bytes), Buffer.from('"}')]);
        const answer = await tenant.send(method, place, { body: new Uint8Array(body), headers: JSON_TYPE });
        expectError(answer, 400, "UTF-8");
      }
    });

    test("refuses lone surrogates and U+0000 in text", async () => {
      const tenant = at.tenant();
      const place = (await paths(tenant))(path);
      const fields = ["name", "description", "plaintext", "vault_ref"];
      for (const text of ["\\ud800", "\\udc00x", "\\u0000"]) {
        for (const field of fields) {
          // A secret may hold any character there is.
          if (field === "plaintext" && text === "\\u0000") continue;
          const body = `{"${field}":"a${text}"}`;
          expectError(await tenant.send(method, place, { body, headers: JSON_TYPE }), 400);
        }
      }
    });

    test("refuses another content type, and takes parameters of the right one", async () => {
      const tenant = at.tenant();
      const place = (await paths(tenant))(path);
      const body = path.startsWith("/v1/agents")
        ? JSON.stringify({ name: "typed" })
        : JSON.stringify({
            plaintext: "x",
            ...(method === "POST" && { name: "typed", auth_type: "none", source: "managed" }),
          });
      for (const type of ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "text/json", ""]) {
        const answer = await tenant.send(method, place, {
          body: new TextEncoder().encode(body),
          headers: { "content-type": type },
        });
        expectError(answer, 400, "content-type");
      }
      const type = "Application/JSON ; charset=utf-8";
      const taken = await tenant.send(method, place, { body, headers: { "content-type": type } });
      expect(taken.status).toBeOneOf([200, 201]);
    });

    test("refuses a body over 1 MiB with 413, with and without a length", async () => {
      const tenant = at.tenant();
      const place = (await paths(tenant))(path);
      const body = new Uint8Array(MIB + 1).fill(0x20);
      expectError(await tenant.send(method, place, { body, headers: JSON_TYPE }), 413);
      const stream = new Blob([body]).stream();
      expectError(await tenant.send(method, place, { body: stream, headers: JSON_TYPE }), 413);
      // At the limit it is read, and then refused for what it is.
      expectError(await tenant.send(method, place, { body: body.subarray(0, MIB), headers: JSON_TYPE }), 400);
    });

    test("takes no field of a strange type", async () => {
      const tenant = at.tenant();
      const place = (await paths(tenant))(path);
      const fields = [
        ...["name", "description", "tags", "upstream_url", "credential_ref", "suspended", "emit_receipts"],
        ...["capture_body", "protocol", "mcp_transport", "mcp_protocol_version", "pricing", "auth_type", "source"],
        ...["plaintext", "vault_ref", "invocation_burst"],
      ];
      for (const field of fields) {
        for (const value of STRANGE) {
          const json = { name: "n", auth_type: "none", source: "managed", [field]: value };
          expectError(await tenant.send(method, place, { json }), 400);
        }
      }
    });
  });

  const PRICING = { amount: "1", asset: "USDC", network: "base", pay_to: `0x${"1".repeat(40)}` };
  const RULE = { action: "deny", match: {} };
  const POLICY = { default: "allow", on_error: "deny", rules: [] };
  const without = (fields: Record<string, unknown>, name: string) => ({ ...fields, [name]: undefined });
  test.each([
    ["POST", "/v1/agents", { nmae: "a" }, "nmae", "name"],
    [
      "POST",
      "/v1/agents",
      { name: "a", pricing: { ...without(PRICING, "pay_to"), payto: "x" } },
      "pricing.payto",
      "pay_to",
    ],
    ["POST", "/v1/agents", { name: "a", pricing: { amonut: "1" } }, "pricing.amonut", "amount"],
    ["POST", "/v1/agents", { name: "a", pricing: { ...PRICING, tolls: {} } }, "pricing.tolls", "tools"],
    ["POST", "/v1/agents", { name: "a", price: "1" }, "price", "pricing"],
    ["POST", "/v1/agents", { url: "https://a.example.com" }, "url", "upstream_url"],
    ["PATCH", "/v1/agents/{id}", { pricing: { payTo: "x" } }, "pricing.payTo", "pay_to"],
    ["POST", "/v1/credentials", { name: "c", plaintxt: "s" }, "plaintxt", "plaintext"],
    ["PUT", "/v1/policy", { ...POLICY, rules: [RULE, { acton: "deny", match: {} }] }, "rules.1.acton", "action"],
    ["PUT", "/v1/policy", { ...POLICY, rules: [{ action: "deny", macth: {} }] }, "rules.0.macth", "match"],
    ["PUT", "/v1/policy", { ...without(POLICY, "on_error"), error: "deny" }, "error", "on_error"],
    ["POST", "/v1/policy/evaluate", { agent: UNKNOWN_AGENT }, "agent", "agent_id"],
    [
      "POST",
      "/v1/policy/evaluate",
      { agent_id: UNKNOWN_AGENT, document: { ...without(POLICY, "default"), defualt: "allow" } },
      "document.defualt",
      "default",
    ],
  ])("%s %s with the misspelt field of %j names it as written, and what it may be meant as", async (...given) => {
    const [method, path, json, field, meant] = given;
    const tenant = at.tenant();
    const answer = await tenant.send(method, (await paths(tenant))(path), { json });
    expectError(answer, 400);
    expect(answer.body.error).toBe(`${field}: unknown field; did you mean ${meant}?`);
  });

  test("a missing field is named where no field beside it is near, however many there are", async () => {
    const tenant = at.tenant();
    const error = async (json: unknown) => (await tenant.send("POST", "/v1/agents", { json })).body.error;
    expect(await error({ x: 1 })).toBe("name: required");
    expect(await error({ name: "a", pricing: { x: 1 } })).toBe(
      "pricing.amount, pricing.asset, pricing.network, pricing.pay_to: required",
    );
    const many = Object.fromEntries(Array.from({ length: 4_000 }, (_, number) => [`field_${number}`, number]));
    expect(await error({ ...many, nmae: "a" })).toBe("name: required");
  });

  test("free metadata may hold equal keys, and the last one counts", async () => {
    const tenant = at.tenant();
    const body = '{"name":"a","metadata":{"a":1,"a":2,"__proto__":3}}';
    const { status, text } = await tenant.send("POST", "/v1/agents", { body, headers: JSON_TYPE });
    expect(status).toBe(201);
    expect(text).toContain('"a":2');
  });

  describe("a proxy body over 32 MiB", () => {
    const size = 32 * MIB + 1;
    const chunk = new Uint8Array(MIB);
    const oversized = () => {
      let left = 33;
      return new ReadableStream({
        pull(controller) {
          if (left-- > 0) controller.enqueue(chunk);
          else controller.close();
        },
      });
    };

    test.each([{}, MCP])("is 413 with and without a length, for %p", async (fields) => {
      const tenant = at.tenant();
      const route = at.upstream();
      const { id } = await tenant.agent({ ...fields, upstream_url: route.url });
      const path = `/v1/proxy/${id}`;
      expectError(await tenant.send("POST", path, { body: new Uint8Array(size) }), 413);
      expectError(await tenant.send("POST", path, { body: oversized() }), 413);
      const claimed = await exchange(at.gateway.url, await head(tenant, `POST ${path}`, `Content-Length: ${size}`));
      expectWireError(claimed, 413);
      const absurd = await exchange(
        at.gateway.url,
        await head(tenant, `POST ${path}`, "Content-Length: 99999999999999999"),
      );
      expect(absurd.status).toBeOneOf([400, 413]);
      expect(route.seen).toEqual([]);
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
    });

    test("keeps memory within bounds when it comes again and again", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const attempt = () => tenant.send("POST", `/v1/proxy/${id}`, { body: oversized() });
      let peak = 0;
      for (let round = 0; round < 14; round++) {
        for (const answer of await Promise.all([attempt(), attempt(), attempt()])) expectError(answer, 413);
        peak = Math.max(peak, rss());
      }
      // 1,400 MiB have come in by now; some 500 MiB is what three bodies and the collector's delay come to.
      expect(peak).toBeLessThan(900);
      await alive();
    });
  });

  describe("limits of the request head", () => {
    test("a head that is too large is refused, and the process serves on", async () => {
      const tenant = at.tenant();
      const long = "x".repeat(200_000);
      for (const request of [
        await head(tenant, "GET /v1/agents", `X-Long: ${long}`),
        await head(tenant, `GET /v1/agents/${long}`),
        await head(tenant, `GET /v1/agents?q=${long}`),
        await head(tenant, "GET /v1/agents", ...Array.from({ length: 5000 }, (_, i) => `X-${i}: ${i}`)),
      ]) {
        const answer = await exchange(at.gateway.url, request);
        expect(answer.status).toBeOneOf([400, 404, 413, 414, 431]);
      }
      await alive();
    });

    test("long but possible URLs and headers are served", async () => {
      const tenant = at.tenant();
      const long = "x".repeat(4000);
      expectError(await tenant.send("GET", `/v1/agents/${long}`), 404);
      expect((await tenant.send("GET", `/v1/invocations?model=${long}`)).body).toMatchObject({ total: 0 });
      expect((await tenant.send("GET", "/v1/agents", { headers: { "x-long": long } })).status).toBe(200);
    });

    test.each(["%", "%zz", "%c3%28", "%ff", "a%2fb", "..%2f..", "%00", "a%0d%0ab"])(
      "the path segment %s is an unknown ID",
      async (segment) => {
        const tenant = at.tenant();
        for (const path of [`/v1/agents/${segment}`, `/v1/invocations/${segment}`, `/v1/credentials/${segment}`]) {
          const answer = await exchange(at.gateway.url, await head(tenant, `GET ${path}`));
          expectWireError(answer, 404);
        }
        const call = await exchange(
          at.gateway.url,
          await head(tenant, `POST /v1/proxy/${segment}`, "Content-Length: 0"),
        );
        expectWireError(call, 404);
      },
    );

    test.each([
      "q=%",
      "q=%ff",
      "q=%00",
      "agent_id=%00",
      "model=%00",
      "error_class=%ed%a0%80",
      "tag=%00",
      "q=a&q=b",
      "&&==&",
      "unknown=1",
    ])("the query %s harms nothing", async (query) => {
      const tenant = at.tenant();
      for (const path of ["/v1/agents", "/v1/invocations"]) {
        const { status } = await exchange(at.gateway.url, await head(tenant, `GET ${path}?${query}`));
        expect(status, path).toBeOneOf([200, 400]);
      }
      await alive();
    });

    test.each([
      ["/v1/agents", "stauts=active", "stauts: unknown parameter; did you mean status?"],
      ["/v1/agents", "cursor=2", "cursor: unknown parameter; known here: limit, offset, status, protocol, tag, q"],
      ["/v1/agents", "limit=1&Limit=2", "Limit: unknown parameter; did you mean limit?"],
      ["/v1/agents", "=1", "query: unknown parameter; known here: limit, offset, status, protocol, tag, q"],
      ["/v1/invocations", "errorclass=internal", "errorclass: unknown parameter; did you mean error_class?"],
      ["/v1/invocations", "untill=2026-01-01", "untill: unknown parameter; did you mean until?"],
      ["/v1/policy/decisions", "offset=1", "offset: unknown parameter; known here: limit"],
      ["/v1/receipts", "offest=1", "offest: unknown parameter; did you mean offset?"],
      ["/v1/credentials", "name=x", "name: unknown parameter; none is taken here"],
    ])("%s does not take %s, and says so", async (path, query, error) => {
      const tenant = at.tenant();
      const answer = await tenant.send("GET", `${path}?${query}`);
      expectError(answer, 400);
      expect(answer.body.error).toBe(error);
      expect((await tenant.send("GET", `${path}?`)).status).toBe(200);
      const long = await tenant.send("GET", `${path}?${"x".repeat(2_000)}=1`);
      expectError(long, 400, "xxx");
      expect(long.text.length).toBeLessThan(400);
    });

    test("a request that is no HTTP, or broken HTTP, is refused", async () => {
      const tenant = at.tenant();
      for (const request of [
        "\u0016\u0003\u0001\u0002\u0000\u0001\r\n\r\n",
        "GET\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        await head(tenant, "POST /v1/agents", "Content-Length: x"),
        await head(tenant, "POST /v1/agents", "Content-Length: -1"),
        await head(tenant, "POST /v1/agents", "Content-Length: 5", "Transfer-Encoding: chunked"),
        `${await head(
          tenant,
          "POST /v1/agents",
          "Content-Type: application/json",
          "Transfer-Encoding: chunked",
        )}zz\r\n`,
      ]) {
        const wire = await connect(at.gateway.url);
        await wire.send(request);
        wire.halfClose();
        const { status } = parseAnswer(await wire.received(isWhole));
        wire.close();
        expect(status, request).toBeOneOf([0, 400, 404, 405, 413, 501, 505]);
      }
      await alive();
    });

    describe.each(["", "/stream"])("a call with a trailer, to /v1/proxy/{id}%s", (suffix) => {
      test.each([
        ["announced", "Trailer: x-checksum"],
        ["unannounced", "X-Other: x-checksum"],
      ])("is refused and leaves no invocation: %s", async (_, announcement) => {
        const tenant = at.tenant();
        const upstream = at.upstream();
        const { id } = await tenant.agent({ upstream_url: upstream.url });
        const line = `POST /v1/proxy/${id}${suffix}`;
        const start = await head(tenant, line, "Transfer-Encoding: chunked", announcement);
        const trailer = "0\r\nx-checksum: 1\r\n\r\n";
        for (const pieces of [
          [`${start}2\r\nab\r\n${trailer}`],
          [`${start}${trailer}`],
          [start, `2\r\nab\r\n${trailer}`],
          [`${start}2\r\nab\r\n`, trailer],
        ]) {
          const wire = await connect(at.gateway.url);
          for (const piece of pieces) await wire.send(piece);
          const received = await wire.received(isWhole);
          wire.close();
          expect(received).toStartWith("HTTP/1.1 400");
          if (announcement.startsWith("Trailer")) expect(received).toContain('"trailer: ');
        }
        expect(await tenant.invoke(id)).toMatchObject({ status: "succeeded" });
        expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
        expect(upstream.seen).toHaveLength(1);
      });
    });

    test("a Host with a space is named as such, and one that is sent twice as sent twice", async () => {
      const start = "GET /version HTTP/1.1\r\n";
      const [spaced, twice] = ["Host: a b\r\n", "Host: a\r\nHost: b\r\n"];
      expectWireError(await exchange(at.gateway.url, `${start}${spaced}\r\n`), 400, "host: must not contain a space");
      expectWireError(await exchange(at.gateway.url, `${start}${twice}\r\n`), 400, "host: must be sent once");
    });

    test("an odd Host harms nothing", async () => {
      const authorization = `Authorization: Bearer ${await at.tenant().token()}`;
      for (const host of ["", "x", "[::1", "a b", "a/b", "%", "\u00ff", "a:99999"]) {
        const request = `GET /v1/agents/${UNKNOWN_AGENT} HTTP/1.1\r\nHost: ${host}\r\n${authorization}\r\n\r\n`;
        const { status } = await exchange(at.gateway.url, request);
        expect(status, host).toBeOneOf([400, 404]);
      }
      await alive();
    });
  });

  describe("clients that are slow or gone", () => {
    test("a body that comes a byte at a time is taken", async () => {
      const tenant = at.tenant();
      const body = '{"name":"slow"}';
      const wire = await connect(at.gateway.url);
      await wire.send(
        await head(tenant, "POST /v1/agents", "Content-Type: application/json", `Content-Length: ${body.length}`),
      );
      for (const byte of body) {
        await wire.send(byte);
        await Bun.sleep(5);
      }
      expect(parseAnswer(await wire.received(isWhole)).status).toBe(201);
      wire.close();
    });

    test("a head that never ends and a body that never comes keep nobody else waiting", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      const starts = [
        "GET /v1/agents HT",
        "GET /v1/agents HTTP/1.1\r\nHost: x\r\nX-",
        await head(tenant, "POST /v1/agents", "Content-Type: application/json", "Content-Length: 100"),
        await head(tenant, `POST /v1/proxy/${id}`, "Content-Length: 33554432"),
        `${await head(tenant, `POST /v1/proxy/${id}`, "Transfer-Encoding: chunked")}5\r\nhel`,
      ];
      const wires = await Promise.all(Array.from({ length: 50 }, () => connect(at.gateway.url)));
      await Promise.all(wires.map((wire, index) => wire.send(starts[index % starts.length]!)));
      expect((await tenant.send("GET", "/v1/agents")).status).toBe(200);
      expect(await tenant.invoke(id)).toMatchObject({ status: "succeeded" });
      for (const wire of wires) wire.close();
      await alive();
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(1);
    });

    test("a body that breaks off leaves no invocation and no agent", async () => {
      const tenant = at.tenant();
      const { id } = await tenant.agent({ upstream_url: at.upstream().url });
      for (const start of [
        `${await head(tenant, `POST /v1/proxy/${id}`, "Content-Length: 100")}part`,
        `${await head(tenant, `POST /v1/proxy/${id}`, "Transfer-Encoding: chunked")}4\r\npart\r\n`,
        `${await head(tenant, "POST /v1/agents", "Content-Type: application/json", "Content-Length: 100")}{"name":"b"}`,
      ]) {
        const wire = await connect(at.gateway.url);
        await wire.send(start);
        wire.close();
      }
      await alive();
      expect((await tenant.send("GET", "/v1/invocations")).body.total).toBe(0);
      expect((await tenant.send("GET", "/v1/agents")).body.total).toBe(1);
    });

    test("a client that has closed its side still gets its answer, or none, and harms nothing", async () => {
      const tenant = at.tenant();
      const wire = await connect(at.gateway.url);
      await wire.send(await head(tenant, "GET /v1/agents"));
      wire.halfClose();
      const { status } = parseAnswer(await wire.received(isWhole));
      wire.close();
      expect(status).toBeOneOf([0, 200]);
      await alive();
    });

    test("a caller who leaves a held poll changes nothing", async () => {
      const tenant = at.tenant();
      const gate = Promise.withResolvers<void>();
      const slow = at.upstream(async () => {
        await gate.promise;
        return new Response("done");
      });
      const { id } = await tenant.agent({ upstream_url: slow.url });
      const invocation = await tenant.call(id);
      await slow.arrival();
      const left = new AbortController();
      const path = `/v1/proxy/${id}/invocations/${invocation}`;
      const held = tenant
        .send("GET", path, { headers: { prefer: "wait=60" }, signal: left.signal })
        .catch(() => "left");
      await tenant.poll(id, invocation);
      left.abort();
      expect((await held) as Json).toBe("left");
      gate.resolve();
      expect(await tenant.ended(id, invocation)).toMatchObject({ status: "succeeded" });
    });
  });

  test("the process is the one that was started, and logged no unexpected error", () => {
    const errors = at.gateway
      .log()
      .split("\n")
      .filter((line) => line.includes('"level":"error"'));
    expect(errors).toEqual([]);
  });
});
