// `tollgate call` as people and scripts meet it, by the binary: what comes on standard output, each exit status, and what it
// does when the network, the gateway or the terminal fails it. Payments on a chain are in paid/call.test.ts; here a gateway
// that asks for wrong payments must get none.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { generatePrivateKey } from "viem/accounts";
import { ask, idOf } from "./support/gateway/api.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { startUpstream, type Upstream } from "./support/http/upstream.ts";
import { type McpServer, startMcpServer } from "./support/mcp/mcp-servers.ts";
import { BASE } from "./support/network.ts";
import { until } from "./support/until.ts";

const home = mkdtempSync(join(tmpdir(), "call-"));
const at = (name: string) => join(home, name);
const BINARY_BODY = new Uint8Array([0, 255, 254, 10, 128, 0]);
const FIRST = "data: first\n\n";
const MIB = 1024 * 1024;

let gateway: Gateway;
let token: string;
let upstream: Upstream;
let mcp: McpServer;
/** Ends what the upstream holds. */
let release = Promise.withResolvers<void>();
const seen: { readonly path: string; readonly type: string | null; readonly key: string | null }[] = [];

function stream(rest: (controller: ReadableStreamDefaultController) => void): Response {
  const body = new ReadableStream({
    async start(controller) {
      controller.enqueue(FIRST);
      await release.promise;
      rest(controller);
    },
  });
  return new Response(body, { headers: { "content-type": "text/event-stream" } });
}

const ANSWERS: Readonly<Record<string, (request: Request) => Response | Promise<Response>>> = {
  "/echo": async (request) => new Response(await request.bytes()),
  "/fails": () => new Response("no such city", { status: 404 }),
  "/held": async () => {
    await release.promise;
    return new Response("late");
  },
  "/stream": () =>
    stream((controller) => {
      controller.enqueue("data: last\n\n");
      controller.close();
    }),
  "/endless": () => {
    const piece = new Uint8Array(1024).fill(0x78);
    return new Response(
      new ReadableStream({ pull: (controller) => Bun.sleep(1).then(() => controller.enqueue(piece)) }),
    );
  },
  "/endless-failure": () => {
    const piece = new Uint8Array(64 * 1024).fill(0x78);
    const body = new ReadableStream({ pull: (controller) => controller.enqueue(piece) });
    return new Response(body, { status: 500 });
  },
  "/breaks": () => stream((controller) => controller.error(new Error("broken"))),
  "/long": () => new Response("x".repeat(MIB + 1)),
  "/moved": () => new Response(null, { status: 302, headers: { location: "http://127.0.0.1:1/" } }),
};

beforeAll(async () => {
  upstream = startUpstream(async (request) => {
    const { pathname } = new URL(request.url);
    const { headers } = request;
    seen.push({ path: pathname, type: headers.get("content-type"), key: headers.get("idempotency-key") });
    return (await ANSWERS[pathname]?.(request)) ?? new Response("?", { status: 500 });
  });
  [gateway, mcp] = await Promise.all([startGateway(), startMcpServer("everything")]);
  token = await gateway.token({ tenant: "acme", user: "me" });
  writeFileSync(at("token"), `${token}\n`, { mode: 0o600 });
  writeFileSync(at("payer"), `${generatePrivateKey()}\n`, { mode: 0o600 });
  writeFileSync(at("body"), BINARY_BODY);
  writeFileSync(at("steering"), "\x1b]0;owned\x07");
  const urls = Object.keys(ANSWERS).map((path) => [path.slice(1), `${upstream.url}${path.slice(1)}`] as const);
  for (const [name, upstream_url] of [...urls, ["nobody", "http://127.0.0.1:1/"] as const]) {
    await idOf(ask(gateway, token, "/v1/agents", { name, upstream_url }));
  }
  const protocol = { protocol: "mcp", mcp_transport: "streamable_http" };
  await idOf(ask(gateway, token, "/v1/agents", { name: "tools", upstream_url: mcp.url, ...protocol }));
  const quiet = { name: "quiet", upstream_url: `${upstream.url}echo`, capture_body: false };
  await idOf(ask(gateway, token, "/v1/agents", quiet));
  await idOf(ask(gateway, token, "/v1/agents", { name: "pending" }));
});
afterAll(async () => {
  release.resolve();
  await gateway?.[Symbol.asyncDispose]();
  await upstream?.stop();
  await mcp?.stop();
  rmSync(home, { recursive: true });
});

interface Options {
  readonly url?: string;
  readonly input?: Uint8Array;
  readonly env?: Readonly<Record<string, string>>;
}

function start(args: readonly string[], { url = gateway.url, input, env = {} }: Options = {}) {
  const own = ["--url", url, ...("TOLLGATE_TOKEN" in env ? [] : ["--token-file", at("token")])];
  const child = Bun.spawn(["setpriv", "--pdeathsig", "KILL", "--", tollgateBinary(), "call", ...args, ...own], {
    cwd: home,
    env: { PATH: "/usr/bin:/bin", ...env },
    stdin: input ?? "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const output = Promise.all([child.exited, child.stdout.bytes(), child.stderr.text()]);
  const ended = output.then(([code, bytes, stderr]) => {
    // The token is told to nobody.
    expect(stderr).not.toContain(token.slice(-20));
    return { code, bytes, stdout: new TextDecoder().decode(bytes), stderr };
  });
  return { child, ended };
}

/** Passes requests on to the gateway. @param instead takes the place of an answer, which it hides */
function startProxy(comes = (_: Request): void => {}, instead = (_: Request): Response | null => null): Upstream {
  return startUpstream(async (request) => {
    comes(request);
    const { pathname, search } = new URL(request.url);
    const { method, headers } = request;
    const body = method === "POST" ? { body: await request.bytes() } : {};
    const answer = await fetch(`${gateway.url}${pathname}${search}`, { method, headers, ...body });
    return instead(request) ?? new Response(await answer.bytes(), answer);
  });
}

const run = (args: readonly string[], options?: Options) => start(args, options).ended;
const refusal = (why: string) => ({ code: 3, stdout: "", stderr: expect.stringContaining(why) });
const ID = /inv_[0-9a-f-]{36}/;
const callsOf = async (query: string) =>
  ((await (await ask(gateway, token, `/v1/invocations?${query}`)).json()) as { data: Record<string, unknown>[] }).data;

describe("a call prints the response alone, byte for byte,", () => {
  test("of an agent by its name or its ID, with what was sent as text, file or standard input", async () => {
    const [agent] = ((await (await ask(gateway, token, "/v1/agents?q=echo")).json()) as { data: { id: string }[] })
      .data;
    const sent: readonly (readonly [string, Options, Uint8Array | string, string | null])[] = [
      ['{"city": "Wien"}', {}, '{"city": "Wien"}', "application/json"],
      ["Wien, Österreich\n", {}, "Wien, Österreich\n", "text/plain; charset=utf-8"],
      ["@body", {}, BINARY_BODY, "application/octet-stream"],
      ["-", { input: BINARY_BODY }, BINARY_BODY, "application/octet-stream"],
      ["", {}, "", null],
    ];
    const keys = new Set<string | null>();
    for (const [index, [data, options, expected, type]] of sent.entries()) {
      const name = index % 2 === 0 ? "echo" : String(agent?.id);
      const { bytes, ...rest } = await run([name, `--data=${data}`], options);
      expect({ data, ...rest, bytes: Buffer.from(bytes) }).toMatchObject({
        ...{ data, code: 0, stderr: "" },
        bytes: Buffer.from(expected),
      });
      expect(seen.at(-1)).toMatchObject({ path: "/echo", type });
      keys.add(seen.at(-1)?.key ?? null);
    }
    // Each run has a key of its own.
    expect(keys.size).toBe(sent.length);
    const unread = await run(["echo"], { input: new Uint8Array([1]) });
    expect(unread).toMatchObject({ code: 0, stdout: "" });
    expect([unread.stderr, seen.at(-1)?.type]).toEqual([
      "tollgate call: note: standard input is not sent; --data - sends it\n",
      null,
    ]);
  });

  test("of an mcp agent, which answers in a session of its server, polled or streamed", async () => {
    const body = (id: number) =>
      JSON.stringify({
        ...{ jsonrpc: "2.0", id, method: "tools/call" },
        params: { name: "get-sum", arguments: { a: 2, b: 3 } },
      });
    const polled = await run(["tools", "--data", body(1)]);
    expect({ ...polled, answer: JSON.parse(polled.stdout) }).toMatchObject({
      ...{ code: 0, stderr: "" },
      answer: { id: 1, result: { content: [{ text: "The sum of 2 and 3 is 5." }] } },
    });
    const streamed = await run(["tools", "--stream", "--data", body(2)]);
    expect([streamed.code, streamed.stderr]).toEqual([0, ""]);
    expect(streamed.stdout).toContain("The sum of 2 and 3 is 5.");
    expect(streamed.stdout).toMatch(/^(event|id|data): /m);
  });

  test("with TOLLGATE_TOKEN, at a URL with a slash at its end", async () => {
    const answered = await run(["echo", "--data", "x"], { url: `${gateway.url}/`, env: { TOLLGATE_TOKEN: token } });
    expect(answered).toMatchObject({ code: 0, stdout: "x", stderr: "" });
  });

  test("and with --json what the gateway has recorded of the call", async () => {
    const done = await run(["echo", "--json", "--data", "x"]);
    expect(done).toMatchObject({ code: 0, stderr: "" });
    expect(JSON.parse(done.stdout)).toMatchObject({ status: "succeeded", response_body_b64: btoa("x") });
    const failed = await run(["fails", "--json"]);
    expect([failed.code, JSON.parse(failed.stdout)]).toMatchObject([1, { status: "failed", upstream_status: 404 }]);
    const none = await run(["nothing-like-it", "--json"]);
    expect([none.code, JSON.parse(none.stdout)]).toEqual([
      3,
      { problems: [expect.stringContaining("no agent is named nothing-like-it")], invocation_id: null },
    ]);
  });
});

describe("a call that fails ends with 1", () => {
  test("and says why, with the agent's response on standard output, if there is one", async () => {
    for (const flags of [[], ["--stream"]]) {
      const answered = await run(["fails", ...flags]);
      expect(answered).toMatchObject({ code: 1, stdout: "no such city" });
      expect(answered.stderr).toMatch(
        /^tollgate call: the call inv_\S+ failed: upstream_4xx, the agent answered 404\n$/,
      );
      const silent = await run(["nobody", ...flags]);
      expect(silent).toMatchObject({ code: 1, stdout: "" });
      expect(silent.stderr).toMatch(
        /^tollgate call: the call inv_\S+ failed: upstream_5xx, connection_refused \(nothing takes connections .+\?\)\n$/,
      );
    }
  });

  test("where only the start of a response was kept, and not where the agent keeps none", async () => {
    const long = await run(["long"]);
    expect([long.code, long.bytes.length]).toEqual([1, MIB]);
    expect(long.stderr).toContain("only the start of the response of inv_");
    expect((await run(["long", "--stream"])).bytes.length).toBe(MIB + 1);
    const quiet = await run(["quiet", "--data", "x"]);
    expect(quiet).toMatchObject({ code: 0, stdout: "", stderr: expect.stringContaining("was not kept") });
    expect(await run(["quiet", "--data", "x", "--stream"])).toMatchObject({ code: 0, stdout: "x", stderr: "" });
  });
});

describe("a streamed call", () => {
  /** The first piece must be on standard output while the upstream still holds the rest. */
  async function streamed(name: string) {
    release = Promise.withResolvers<void>();
    const child = Bun.spawn(
      [tollgateBinary(), "call", name, "--stream", "--url", gateway.url, "--token-file", at("token")],
      { cwd: home, env: { PATH: "/usr/bin:/bin" }, stdin: "ignore", stdout: "pipe", stderr: "pipe" },
    );
    const reader = child.stdout.getReader();
    const first = new TextDecoder().decode((await reader.read()).value);
    const rest = async () => {
      let text = "";
      for (let next = await reader.read(); !next.done; next = await reader.read()) text += Buffer.from(next.value);
      return { rest: text, code: await child.exited, stderr: await child.stderr.text() };
    };
    return { child, reader, first, rest };
  }

  test("is printed as it comes", async () => {
    const { first, rest } = await streamed("stream");
    expect(first).toBe(FIRST);
    release.resolve();
    expect(await rest()).toEqual({ rest: "data: last\n\n", code: 0, stderr: "" });
  });

  test("that breaks ends with 1", async () => {
    const { first, rest } = await streamed("breaks");
    release.resolve();
    expect([first, await rest()]).toEqual([
      FIRST,
      {
        rest: "",
        code: 1,
        stderr: expect.stringMatching(
          /: the call inv_\S+ failed: upstream_5xx, connection_reset \(the upstream closed the connection before its response was whole\)\n$/,
        ),
      },
    ]);
  });

  test("ends quietly when nobody reads on, as in a pipe to head", async () => {
    const { child, reader } = await streamed("endless");
    await reader.cancel();
    expect([await child.exited, await child.stderr.text()]).toEqual([141, ""]);
  });

  test("that fails without an end is cut, and ends with 1", async () => {
    const { code, stdout } = await run(["endless-failure", "--stream"]);
    expect(code).toBe(1);
    expect(stdout.length).toBeLessThan(4 * MIB);
  });

  test("is cancelled by Ctrl-C", async () => {
    const { child, rest } = await streamed("stream");
    child.kill("SIGINT");
    const { code, stderr } = await rest();
    expect([code, stderr]).toEqual([130, expect.stringMatching(/: stopped: the call inv_\S+ ends as cancelled\n$/)]);
    await until(async () => (await callsOf("error_class=cancelled")).some(({ id }) => stderr.includes(String(id))));
    release.resolve();
  });
});

describe("a call that has not ended", () => {
  test("goes on when the wait runs out, and where its result can be read is told with status 4", async () => {
    const results: string[] = [];
    release = Promise.withResolvers<void>();
    for (const wait of ["0", "1"]) {
      const waited = await run(["held", "--wait", wait]);
      expect(waited).toMatchObject({ code: 4, stdout: "" });
      const why = wait === "0" ? "--wait is 0" : "timed out waiting";
      const [, result = ""] =
        / goes on as inv_\S+; its result: curl -H "Authorization: Bearer \$TOLLGATE_TOKEN" (\S+)\n$/.exec(
          waited.stderr,
        ) ?? [];
      expect(waited.stderr).toStartWith(`tollgate call: ${why}: the call `);
      results.push(result);
    }
    release.resolve();
    for (const result of results) {
      const headers = { authorization: `Bearer ${token}`, prefer: "wait=60" };
      const view = await (await fetch(result, { headers })).json();
      expect(view).toMatchObject({ status: "succeeded", response_body_b64: btoa("late") });
    }
  });

  test("goes on after Ctrl-C, and its ID is told", async () => {
    release = Promise.withResolvers<void>();
    const polled = Promise.withResolvers<void>();
    const proxy = startProxy(({ url }) => void (url.includes("/invocations/") && polled.resolve()));
    const { child, ended } = start(["held"], { url: proxy.url });
    await polled.promise;
    child.kill("SIGINT");
    const { code, stdout, stderr } = await ended;
    await proxy.stop();
    expect({ code, stdout }).toEqual({ code: 130, stdout: "" });
    expect(stderr).toMatch(
      /^tollgate call: stopped: the call goes on as inv_\S+; its result: curl -H "Authorization: Bearer \$TOLLGATE_TOKEN" \S+\n$/,
    );
    release.resolve();
    const [id] = ID.exec(stderr) ?? [];
    await until(async () => (await callsOf("status=succeeded&limit=5")).some((each) => each["id"] === id));
  });

  test("shows its progress on a terminal, and ends the response with a line feed there", async () => {
    const shown = await shownOnTerminal(["echo", "--data", "Wien"], "Wien\r\n");
    expect(shown).toContain("calling echo: 0 s");
    expect(shown).toMatch(/the call is inv_\S+\r\n/);
    expect(await shownOnTerminal(["echo", "--stream", "--data", "Wien"], "Wien\r\n")).toContain("Wien\r\n");
  });

  test("shows no control characters on a terminal, and says how to keep the response", async () => {
    for (const args of [["echo"], ["echo", "--stream"]])
      for (const data of ["@steering", "@body"]) {
        const shown = await shownOnTerminal([...args, "--data", data], "(> FILE)");
        expect(shown).not.toContain("owned");
        expect(shown).toContain("has control characters and is not shown on a terminal: send it to a file");
      }
    const { bytes } = await run(["echo", "--data", "@body"]);
    expect(bytes).toEqual(BINARY_BODY);
  });
});

/** What a terminal shows of a call that succeeds. */
async function shownOnTerminal(args: readonly string[], last: string, url = gateway.url): Promise<string> {
  const shown: string[] = [];
  const child = Bun.spawn([tollgateBinary(), "call", ...args, "--url", url, "--token-file", at("token")], {
    ...{ cwd: home, env: { PATH: "/usr/bin:/bin", TERM: "xterm" } },
    terminal: { cols: 200, rows: 24, data: (_terminal, bytes) => void shown.push(new TextDecoder().decode(bytes)) },
  });
  expect(await child.exited).toBe(0);
  await until(() => shown.join("").includes(last));
  return shown.join("");
}

describe("the gateway takes no call, with status 3,", () => {
  test("of an agent that it does not know, or that can't be called", async () => {
    const unknown = "agt_01a1fdf0-325d-72bb-9022-a56f8b61e206";
    expect(await run(["ehco"])).toMatchObject(refusal("no agent is named ehco; did you mean echo?"));
    expect(await run(["weather-report"])).toMatchObject(
      refusal("no agent is named weather-report; the tenant has pending,"),
    );
    expect(await run([unknown])).toMatchObject(refusal("the gateway refused the call (404): no such agent"));
    expect(await run([unknown, "--stream"])).toMatchObject(
      refusal("the gateway refused the call (404): no such agent"),
    );
    // It looks like an ID, and is none.
    expect(await run(["agt_1"])).toMatchObject(refusal("no agent is named agt_1; the tenant has"));
    expect(await run(["pending"])).toMatchObject(refusal("the gateway refused the call (422): "));
  });

  test("of a token that it does not accept, of a tenant without agents, and where there is no gateway", async () => {
    const other = await gateway.token({ tenant: "other", user: "me" });
    const env = { TOLLGATE_TOKEN: "not.a.token" };
    expect(await run(["echo"], { env })).toMatchObject(
      refusal("the gateway refused the call (401): the token has expired"),
    );
    expect(await run(["echo"], { env: { TOLLGATE_TOKEN: other } })).toMatchObject(refusal("has no agents"));
    const closed = "http://127.0.0.1:1";
    expect(await run(["echo"], { url: closed })).toMatchObject(
      refusal(`nothing listens at ${closed}: start the gateway`),
    );
  });

  test("from something that is no gateway, to which a redirect leads, or whose way is open to others", async () => {
    let asked = 0;
    const elsewhere = startUpstream(() => {
      asked += 1;
      return new Response("<html>", { headers: { "content-type": "text/html" } });
    });
    const redirect = startUpstream(() => Response.redirect(elsewhere.url, 307));
    try {
      expect(await run(["echo"], { url: redirect.url })).toMatchObject(refusal("which is not followed"));
      expect(asked).toBe(0);
      const open = `http://0.0.0.0:${elsewhere.port}`;
      const answered = await run(["echo"], { url: open });
      expect({ ...answered }).toMatchObject(refusal(": check --url"));
      expect(answered.stderr).toContain(`warning: ${open} is plain http`);
      expect(asked).toBe(1);
    } finally {
      await Promise.all([redirect.stop(), elsewhere.stop()]);
    }
  });
});

const AGENT = "agt_01a1fdf0-325d-72bb-9022-a56f8b61e206";
const INVOCATION = "inv_01a1fe82-6150-76c4-88cd-d52641e175bf";
const TERMS = {
  ...{
    scheme: "exact",
    network: "base",
    maxAmountRequired: "50000",
    resource: "http://127.0.0.1/",
    maxTimeoutSeconds: 60,
  },
  ...{ description: "", mimeType: "", asset: BASE.token.address, payTo: `0x${"11".repeat(20)}` },
};
const challenge = (terms: object) =>
  Response.json({ x402Version: 1, error: "pay", accepts: [{ ...TERMS, ...terms }] }, { status: 402 });

/** Stands in for a gateway that is hostile or broken. `answer` gets each POST, with its payment and their number. */
function startOddGateway(answer: (payment: string | null, count: number) => Response | Promise<Response>) {
  const posts: { readonly payment: string | null; readonly key: string | null }[] = [];
  const server = startUpstream((request) => {
    if (request.method === "GET") return Response.json({ ...ENDED, id: AGENT, name: "odd", protocol: "http" });
    const payment = request.headers.get("x-payment");
    posts.push({ payment, key: request.headers.get("idempotency-key") });
    return answer(payment, posts.length);
  });
  return { ...server, posts };
}
const ENDED = {
  status: "succeeded",
  response_body_b64: btoa("done"),
  response_truncated: false,
  settlement: { status: "settled" },
};
const accepted = () =>
  Response.json({ invocation_id: INVOCATION }, { status: 202, headers: { "x-service-invocation-id": INVOCATION } });
/** Ends the connection without an answer. */
const hangUp = () => new Response(new ReadableStream({ start: (controller) => controller.error(new Error("gone")) }));

const PAYING = [AGENT, "--payer-key-file", "payer", "--max-price", "0.05"];

describe("nothing is signed", () => {
  const wrong: readonly (readonly [what: string, terms: object, told: string])[] = [
    ["above --max-price", { maxAmountRequired: "50001" }, "the call costs 0.050001 USDC on Base to 0x1111"],
    ["in another token", { asset: `0x${"22".repeat(20)}` }, "this command pays only in USDC"],
    ["on a network that is not known", { network: "nowhere" }, "the gateway asks for exact on nowhere"],
    ["on a network named like a property of objects", { network: "constructor" }, "asks for exact on constructor"],
    ["by another scheme", { scheme: "upto" }, "the gateway asks for upto on base"],
    ["to nobody", { payTo: undefined }, "accepts.0.payTo: required"],
    ["to what is no address", { payTo: "me" }, "accepts.0.payTo: must be an address"],
    ["with an amount that is no number", { maxAmountRequired: "-1" }, "accepts.0.maxAmountRequired: must be"],
  ];
  for (const [what, terms, told] of wrong) {
    test(`for a price ${what}`, async () => {
      const odd = startOddGateway(() => challenge(terms));
      try {
        expect(await run(PAYING, { url: odd.url })).toMatchObject(refusal(told));
        expect(odd.posts.map(({ payment }) => payment)).toEqual([null]);
      } finally {
        await odd.stop();
      }
    });
  }

  test("without a key, or without a price that is allowed", async () => {
    const odd = startOddGateway(() => challenge({}));
    try {
      const [noKey, noPrice] = [PAYING.toSpliced(1, 2), PAYING.slice(0, 3)];
      expect(await run(noKey, { url: odd.url })).toMatchObject(
        refusal("there is no key to pay with: nothing was paid; to pay, add --payer-key-file FILE --max-price 0.05\n"),
      );
      expect(await run(noPrice, { url: odd.url })).toMatchObject(
        refusal("--max-price is 0: nothing was paid; to pay, raise --max-price to 0.05\n"),
      );
      expect(odd.posts.map(({ payment }) => payment)).toEqual([null, null]);
    } finally {
      await odd.stop();
    }
  });
});

const paymentIn = (header: string | null | undefined) =>
  JSON.parse(Buffer.from(header ?? "", "base64").toString()).payload.authorization as Record<string, string>;

describe("one payment is signed in a run", () => {
  test("for the token's own domain and no longer than a minute, however long the gateway asks for", async () => {
    const odd = startOddGateway((payment) => (payment === null ? challenge({ maxTimeoutSeconds: 1e9 }) : accepted()));
    try {
      expect(await run(PAYING, { url: odd.url })).toMatchObject({ code: 0, stdout: "done", stderr: "" });
      const { to, value, validBefore } = paymentIn(odd.posts[1]?.payment);
      expect({ to, value }).toEqual({ to: TERMS.payTo, value: "50000" });
      expect(Number(validBefore)).toBeLessThanOrEqual(Date.now() / 1000 + 60);
    } finally {
      await odd.stop();
    }
  });

  test("whose terms a terminal shows before", async () => {
    const odd = startOddGateway((payment) => (payment === null ? challenge({}) : accepted()));
    try {
      const shown = await shownOnTerminal(PAYING, "done\r\n", odd.url);
      expect(shown).toContain(`paying 0.05 USDC on Base to ${TERMS.payTo}, from 0x`);
    } finally {
      await odd.stop();
    }
  });

  test("and sent again with its key when the answer is lost or says that the outcome is unknown", async () => {
    const odd = startOddGateway((payment, count) => {
      if (count === 1) return hangUp();
      if (payment === null) return challenge({});
      if (count === 3) return hangUp();
      if (count === 4) return Response.json({ error: "unknown" }, { status: 503, headers: { "retry-after": "1" } });
      return accepted();
    });
    try {
      expect(await run(PAYING, { url: odd.url })).toMatchObject({ code: 0, stdout: "done", stderr: "" });
      expect(odd.posts.map(({ payment }) => payment !== null)).toEqual([false, false, true, true, true]);
      expect(new Set(odd.posts.map(({ key }) => key)).size).toBe(1);
      expect(new Set(odd.posts.slice(2).map(({ payment }) => payment)).size).toBe(1);
    } finally {
      await odd.stop();
    }
  });

  test("and never a second one, where the gateway asks again", async () => {
    const odd = startOddGateway(() => challenge({}));
    try {
      expect(await run(PAYING, { url: odd.url })).toMatchObject(refusal("it answered 402: pay"));
      expect(odd.posts.map(({ payment }) => payment !== null)).toEqual([false, true]);
    } finally {
      await odd.stop();
    }
  });

  test("whose outcome is told as unknown where an answer says that it was collected, or that a call was taken", async () => {
    const collected = { "x-payment-response": btoa(JSON.stringify({ success: true, transaction: "0x1" })) };
    for (const answer of [
      () => Response.json({ error: "no" }, { status: 402, headers: collected }),
      () => Response.json({ error: "no" }, { status: 404, headers: collected }),
      () => Response.json({ invocation_id: INVOCATION }, { status: 202 }),
    ]) {
      const odd = startOddGateway((payment) => (payment === null ? challenge({}) : answer()));
      try {
        const unknown = await run(PAYING, { url: odd.url });
        expect(unknown).toMatchObject({ code: 4, stdout: "" });
        expect(unknown.stderr).toContain(`payment_nonce ${paymentIn(odd.posts[1]?.payment)["nonce"]}`);
      } finally {
        await odd.stop();
      }
    }
  });

  test("whose transaction is shown only if it is a text", async () => {
    const odd = startOddGateway((payment) => {
      if (payment === null) return challenge({});
      const answer = accepted();
      answer.headers.set("x-payment-response", btoa(JSON.stringify({ transaction: { toString: 1 } })));
      return answer;
    });
    try {
      expect(await run(PAYING, { url: odd.url })).toMatchObject({ code: 0, stdout: "done" });
    } finally {
      await odd.stop();
    }
  });

  test("whose outcome is told as unknown where it is, and not as a refusal", async () => {
    const answers = [() => challenge({}), hangUp, () => new Response(null, { status: 401 })];
    const odd = startOddGateway((_, count) => answers[count - 1]?.() ?? new Promise<Response>(() => {}));
    try {
      const unknown = await run(PAYING, { url: odd.url });
      const { nonce } = paymentIn(odd.posts[2]?.payment);
      expect(unknown).toMatchObject({ code: 4, stdout: "" });
      expect(unknown.stderr).toContain("unknown whether the payment of 0.05 USDC by 0x");
      expect(unknown.stderr).toContain(`payment_nonce ${nonce} in the history before you pay again`);
    } finally {
      await odd.stop();
    }
  });

  test("also when Ctrl-C comes before the answer", async () => {
    const odd = startOddGateway((payment) => (payment === null ? challenge({}) : new Promise<Response>(() => {})));
    try {
      const { child, ended } = start(PAYING, { url: odd.url });
      await until(() => odd.posts.length === 2);
      child.kill("SIGINT");
      expect(await ended).toMatchObject({ code: 130, stderr: expect.stringContaining("before you pay again") });
    } finally {
      await odd.stop();
    }
  });
});

test("an unpaid request whose answer is lost is sent again and makes one call", async () => {
  const before = (await callsOf("limit=100")).length;
  let lost = 0;
  const proxy = startProxy(undefined, ({ method }) => (method === "POST" && ++lost <= 2 ? hangUp() : null));
  try {
    expect(await run(["echo", "--data", "once"], { url: proxy.url })).toMatchObject({
      code: 0,
      stdout: "once",
      stderr: "",
    });
    expect([lost, (await callsOf("limit=100")).length - before]).toEqual([3, 1]);
  } finally {
    await proxy.stop();
  }
});

test("a streamed request whose answer is lost makes one call, and what the gateway has kept of the response is printed", async () => {
  const before = (await callsOf("limit=100")).length;
  let posts = 0;
  const proxy = startProxy(undefined, ({ method }) => (method === "POST" && ++posts === 1 ? hangUp() : null));
  try {
    const ended = await run(["echo", "--stream", "--data", "once"], { url: proxy.url });
    expect(ended).toMatchObject({ code: 0, stdout: "once", stderr: "" });
    expect([posts, (await callsOf("limit=100")).length - before]).toEqual([2, 1]);
    posts = 0;
    const lost = await run(["quiet", "--stream", "--data", "x"], { url: proxy.url });
    expect(lost).toMatchObject({ code: 1, stdout: "", stderr: expect.stringContaining("lost with the connection") });
  } finally {
    await proxy.stop();
  }
});

test("a streamed call whose answer is lost is looked for by its key, and what became of it is told", async () => {
  const headers = { "x-service-invocation-id": INVOCATION, "retry-after": "1" };
  const odd = startOddGateway((_, count) => {
    if (count === 1) return hangUp();
    if (count === 2) return Response.json({ error: "not known yet" }, { status: 503, headers });
    return Response.json({ error: "this call has been made already" }, { status: 409, headers });
  });
  try {
    expect(await run([AGENT, "--stream"], { url: odd.url })).toMatchObject({ code: 0, stdout: "done", stderr: "" });
    expect(new Set(odd.posts.map(({ key }) => key)).size).toBe(1);
  } finally {
    await odd.stop();
  }
});

test("what a gateway says can't steer the terminal", async () => {
  const headers = { "x-request-id": "r1" };
  const odd = startOddGateway(() => Response.json({ error: "\u001b[2Jgone\u0007" }, { status: 422, headers }));
  try {
    const { code, stderr } = await run([AGENT], { url: odd.url });
    expect({ code, stderr }).toEqual({ code: 3, stderr: expect.stringMatching(/^\P{Cc}+\[2Jgone \n$/u) });
  } finally {
    await odd.stop();
  }
});
