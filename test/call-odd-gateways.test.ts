// `tollgate call` at gateways that are hostile, broken, or none: whatever is answered, the command ends soon, with one clear line
// and the right exit status. What it does at a real gateway is in call.test.ts.
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { generatePrivateKey } from "viem/accounts";
import { MAX } from "../src/kernel/limits.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { startGateway } from "./support/gateway/gateway.ts";
import { SERVER } from "./support/http/certificates.ts";
import { startRawUpstream, startUpstream } from "./support/http/upstream.ts";
import { BASE } from "./support/network.ts";

const home = mkdtempSync(join(tmpdir(), "odd-gateways-"));
beforeAll(() => writeFileSync(join(home, "payer"), `${generatePrivateKey()}\n`, { mode: 0o600 }));
afterAll(() => rmSync(home, { recursive: true }));

const AGENT = "agt_01a1fdf0-325d-72bb-9022-a56f8b61e206";
const INVOCATION = "inv_01a1fe82-6150-76c4-88cd-d52641e175bf";
const HEADERS = { "x-request-id": "r1" };
const WITH_ID = { ...HEADERS, "x-service-invocation-id": INVOCATION };
const accepted = () => Response.json({ invocation_id: INVOCATION }, { status: 202, headers: WITH_ID });
/** The view of a call, and an agent in the same object. */
const ENDED = {
  ...{ id: AGENT, name: "odd", protocol: "http" },
  ...{ status: "succeeded", error_class: null, error_detail: null, upstream_status: 200, settlement: null },
  ...{ response_truncated: false, response_body_b64: btoa("done") },
};

interface Ended {
  readonly code: number;
  readonly stdout: string;
  readonly stderr: string;
}

async function runAt(url: string, args: readonly string[], token = "t.t.t"): Promise<Ended> {
  const child = Bun.spawn(
    ["setpriv", "--pdeathsig", "KILL", "--", tollgateBinary(), "call", ...args, ...(url === "" ? [] : ["--url", url])],
    {
      ...{ cwd: home, env: { PATH: "/usr/bin:/bin", TOLLGATE_TOKEN: token } },
      ...{ stdin: "ignore", stdout: "pipe", stderr: "pipe", timeout: 30_000, killSignal: "SIGKILL" },
    },
  );
  const [code, stdout, stderr] = await Promise.all([child.exited, child.stdout.text(), child.stderr.text()]);
  return { code, stdout, stderr };
}

/** Runs the command at a gateway that answers so, and expects one line at most. */
async function runOdd(args: readonly string[], answer: (request: Request) => Response): Promise<Ended> {
  const odd = startUpstream(answer);
  try {
    const ended = await runAt(odd.url, args);
    expect(ended.stderr).toMatch(/^(tollgate call: [^\n]+\n)?$/);
    return ended;
  } finally {
    await odd.stop();
  }
}

const polls = (view: unknown) => (request: Request) =>
  request.method === "POST" ? accepted() : Response.json(view, { headers: HEADERS });

describe("an answer whose fields have other types than a gateway's", () => {
  const views: readonly (readonly [what: string, fields: object, told: string])[] = [
    ["error_class that is an object", { status: "failed", error_class: { toString: 1 } }, "error_class"],
    ["error_detail that is a list", { status: "failed", error_detail: [1] }, "error_detail"],
    ["settlement that is a text", { settlement: "settled" }, "settlement"],
    ["transaction that is an object", { status: "failed", settlement: { status: "x", tx_hash: {} } }, "settlement"],
    ["response that is a number", { response_body_b64: 5 }, "response_body_b64"],
    ["response that is an object with a length", { response_body_b64: { length: 1e9 } }, "response_body_b64"],
    ["response that is not base64", { response_body_b64: "%%%" }, "response_body_b64"],
    ["status that no call has", { status: "weird" }, "status"],
    ["no status", { status: undefined }, "status"],
    ["nothing in it", { view: null }, "a JSON object"],
  ];
  for (const [what, fields, told] of views) {
    test(`is told with status 4, as the call was taken: a view with ${what}`, async () => {
      const { code, stdout, stderr } = await runOdd(
        [AGENT],
        polls("view" in fields ? fields.view : { ...ENDED, ...fields }),
      );
      expect({ code, stdout }).toEqual({ code: 4, stdout: "" });
      expect(stderr).toContain(`the call goes on as ${INVOCATION}`);
      expect(stderr).toContain(told);
    });
  }

  const lists: readonly (readonly [what: string, list: unknown, told: string])[] = [
    ["name that is an object", { data: [{ id: AGENT, name: {}, protocol: "http" }], total: 1 }, "data.0.name"],
    ["agent that is null", { data: [null], total: 1 }, "data.0"],
    ["ID with a path", { data: [{ id: "agt_/../x", name: "echo", protocol: "http" }], total: 1 }, "data.0.id"],
    ["total that is a text", { data: [], total: "many" }, "total"],
  ];
  for (const [what, list, told] of lists) {
    test(`is told with status 3, as no call was made: a list with an ${what}`, async () => {
      const ended = await runOdd(["echo"], () => Response.json(list, { headers: HEADERS }));
      expect(ended).toMatchObject({ code: 3, stdout: "" });
      expect(ended.stderr).toContain(
        `is not a tollgate gateway: check --url (it answered 200, and ${told} is missing or not valid)`,
      );
    });
  }
});

test("a list of agents without an end is read up to a bound", async () => {
  let asked = 0;
  const agents = Array.from({ length: MAX.pageItems }, () => ({ id: AGENT, name: "other", protocol: "http" }));
  const { code, stderr } = await runOdd(["echo"], () => {
    asked += 1;
    return Response.json({ data: agents, total: 1e9 }, { headers: HEADERS });
  });
  expect(code).toBe(3);
  expect(stderr).toContain("no agent is named echo among the first 10,000 that match: give its ID");
  expect(asked).toBe(MAX.agentsSearched / MAX.pageItems);
});

describe("a call that was taken already", () => {
  const taken = () => Response.json({ error: "this call has been made already" }, { status: 409, headers: WITH_ID });
  const repeated = (view: object) => (request: Request) =>
    request.method === "POST" ? taken() : Response.json({ ...ENDED, ...view }, { headers: HEADERS });

  test("is waited for, polled and streamed, and its response is printed", async () => {
    for (const flags of [[], ["--stream"]]) {
      expect(await runOdd([AGENT, ...flags], repeated({}))).toEqual({ code: 0, stdout: "done", stderr: "" });
      const failed = await runOdd([AGENT, ...flags], repeated({ status: "failed", error_class: "timeout" }));
      expect(failed).toMatchObject({ code: 1, stderr: expect.stringContaining(`${INVOCATION} failed: timeout`) });
    }
  });

  test("is told as unknown where it has not ended, and never as failed", async () => {
    for (const flags of [[], ["--stream"]]) {
      const running = await runOdd([AGENT, "--wait", "0", ...flags], repeated({ status: "running" }));
      expect(running).toMatchObject({
        code: 4,
        stdout: "",
        stderr: expect.stringContaining(`goes on as ${INVOCATION}`),
      });
    }
  });

  test("and whose response was lost with its stream ends with 1", async () => {
    const lost = await runOdd([AGENT, "--stream"], repeated({ response_body_b64: undefined }));
    expect(lost).toMatchObject({ code: 1, stdout: "", stderr: expect.stringContaining("was lost") });
  });
});

test("what a gateway itself answers to a streamed call goes to standard error, and what the agent answers is printed", async () => {
  const answers = (status: number, upstream_status: number | null) => (request: Request) =>
    request.method === "POST"
      ? Response.json({ error: "of its own" }, { status, headers: WITH_ID })
      : Response.json({ ...ENDED, status: "failed", upstream_status }, { headers: HEADERS });
  for (const status of [404, 409]) {
    const its = await runOdd([AGENT, "--stream"], answers(status, status));
    expect(its).toMatchObject({ code: 1, stdout: '{"error":"of its own"}' });
  }
  expect(await runOdd([AGENT, "--stream"], answers(422, 302))).toMatchObject({ code: 1, stdout: "" });
  const untold = await runOdd([AGENT, "--stream"], (request) =>
    request.url.includes("/invocations/")
      ? new Response(null, { status: 404, headers: HEADERS })
      : answers(422, null)(request),
  );
  expect(untold).toMatchObject({ code: 1, stdout: "", stderr: expect.stringContaining("of its own") });
});

test("a 202 without the ID of a call is told as unknown, and so is another success with one", async () => {
  for (const [status, headers, why] of [
    [202, HEADERS, "it is unknown whether the gateway took the call"],
    [200, WITH_ID, `the call is ${INVOCATION}`],
  ] as const) {
    const ended = await runOdd([AGENT], () => Response.json({}, { status, headers }));
    expect(ended).toMatchObject({ code: 4, stdout: "", stderr: expect.stringContaining(why) });
  }
});

test("a 409 without the ID of a call is a refusal", async () => {
  for (const flags of [[], ["--stream"]]) {
    const ended = await runOdd([AGENT, ...flags], ({ method }) =>
      method === "GET"
        ? Response.json(ENDED, { headers: HEADERS })
        : Response.json({ error: "no" }, { status: 409, headers: HEADERS }),
    );
    expect(ended).toMatchObject({
      code: 3,
      stdout: "",
      stderr: expect.stringContaining("the gateway refused the call (409): no"),
    });
  }
});

describe("a refusal whose body can't be read", () => {
  const MIB = new Uint8Array(1024 * 1024).fill(0x20);
  /** A body that comes without end, fast or after its first part not at all. */
  const endless = (isFast: boolean) =>
    new ReadableStream({
      start: (body) => body.enqueue(MIB),
      pull: (body) => (isFast ? body.enqueue(MIB) : new Promise(() => {})),
    });
  const bodies: readonly (readonly [
    what: string,
    body: () => ConstructorParameters<typeof Response>[0],
    why: string,
  ])[] = [
    ["is too long", () => endless(true), "the answer is too long"],
    ["stops coming", () => endless(false), "no answer in time"],
  ];
  for (const [what, body, why] of bodies) {
    test(`since it ${what} is told at once, with its status`, async () => {
      for (const [args, status] of [
        [[AGENT], 404],
        [[AGENT, "--stream"], 422],
        [["echo"], 403],
      ] as const) {
        let asked = 0;
        const { code, stdout, stderr } = await runOdd(args, () => {
          asked++;
          return new Response(body(), { status, headers: HEADERS });
        });
        expect({ code, stdout, asked }).toEqual({ code: 3, stdout: "", asked: 1 });
        expect(stderr).toContain(
          `the gateway refused the call (${status}); the body of the answer can't be read: ${why}`,
        );
      }
    });
  }
});

test("an agent's refusal that is streamed and stops coming is printed as far as it came, soon", async () => {
  const stalled = new ReadableStream({ start: (body) => body.enqueue(new TextEncoder().encode("no, ")) });
  const ended = await runOdd([AGENT, "--stream"], ({ url }) =>
    url.includes("/stream")
      ? new Response(stalled, { status: 400, headers: WITH_ID })
      : Response.json({ ...ENDED, status: "failed", upstream_status: 400 }, { headers: HEADERS }),
  );
  expect(ended).toMatchObject({ code: 1, stdout: "no, ", stderr: expect.stringContaining("the agent answered 400") });
});

test("an encoding that can't be decoded is a failed answer", async () => {
  const headers = { ...WITH_ID, "content-encoding": "gzip, gzip, gzip" };
  const told = { stdout: "", stderr: expect.stringContaining("more than 2 encodings") };
  expect(await runOdd(["echo"], () => new Response("x", { headers }))).toMatchObject({ code: 3, ...told });
  const streamed = await runOdd([AGENT, "--stream"], ({ url }) =>
    url.includes("/stream") ? new Response("x", { headers }) : Response.json(ENDED, { headers: HEADERS }),
  );
  expect(streamed).toMatchObject({ code: 1, ...told });
});

test("a payment that is declined is told with its nonce, and until when it can be collected", async () => {
  let nonce = "";
  const terms = {
    ...{ scheme: "exact", network: "base", maxAmountRequired: "50000", resource: "http://g.test/" },
    ...{ asset: BASE.token.address, payTo: `0x${"11".repeat(20)}`, maxTimeoutSeconds: 60, description: "" },
  };
  for (const status of [402, 403, 422]) {
    const ended = await runOdd([AGENT, "--payer-key-file", "payer", "--max-price", "0.05"], ({ headers }) => {
      const payment = headers.get("x-payment");
      if (payment === null) return Response.json({ x402Version: 1, error: "pay", accepts: [terms] }, { status: 402 });
      ({ nonce } = JSON.parse(Buffer.from(payment, "base64").toString()).payload.authorization);
      return Response.json({ error: "declined ".repeat(500) }, { status, headers: HEADERS });
    });
    expect(ended).toMatchObject({ code: 3, stdout: "" });
    expect(ended.stderr).toMatch(
      new RegExp(`\\(${status}\\): declined .*; .*payment_nonce ${nonce}, .*until 20\\d\\d-.*Z\n$`),
    );
  }
});

describe("a paid call", () => {
  const terms = {
    ...{ scheme: "exact", network: "base", maxAmountRequired: "50000", resource: "http://g.test/" },
    ...{ asset: BASE.token.address, payTo: `0x${"11".repeat(20)}`, maxTimeoutSeconds: 60, description: "" },
  };
  const paid = (flags: readonly string[], view: (() => Response) | object, answer: () => Response) =>
    runOdd([AGENT, "--payer-key-file", "payer", "--max-price", "0.05", ...flags], ({ method, url, headers }) => {
      if (method === "GET" && url.includes("/invocations/"))
        return typeof view === "function" ? view() : Response.json({ ...ENDED, ...view }, { headers: HEADERS });
      if (method === "GET") return Response.json(ENDED, { headers: HEADERS });
      if (headers.has("x-payment")) return answer();
      return Response.json({ x402Version: 1, error: "pay", accepts: [terms] }, { status: 402, headers: HEADERS });
    });

  test("whose streamed response breaks off is told to have succeeded, with what became of its payment", async () => {
    const early = `and the response of ${INVOCATION} ended early: [^\n]+\n$`;
    const breaks = () => new Response("no gzip", { headers: { ...WITH_ID, "content-encoding": "gzip" } });
    for (const [view, told] of [
      [
        { settlement: { status: "settled", tx_hash: "0xabc" } },
        `^tollgate call: the call succeeded, its payment was taken \\(transaction 0xabc\\), ${early}`,
      ],
      [
        { settlement: { status: "pending", tx_hash: null } },
        `the call succeeded, its payment is open: don't pay again, ${early}`,
      ],
      [() => new Response(null, { status: 404, headers: HEADERS }), "unknown whether the payment of 0.05 USDC by 0x"],
    ] as const) {
      const ended = await paid(["--stream"], view, breaks);
      expect(ended).toMatchObject({ code: 1, stderr: expect.stringMatching(new RegExp(told)) });
    }
  });

  test("whose payment nobody collects gets a note", async () => {
    const note = "tollgate call: note: the tenant has no facilitator: the payment was checked and not collected\n";
    expect(await paid([], {}, accepted)).toEqual({ code: 0, stdout: "done", stderr: note });
    const settlement = { status: "settled", tx_hash: "0x1" };
    expect(await paid([], { settlement }, accepted)).toEqual({ code: 0, stdout: "done", stderr: "" });
    const whole = (told: object) => () => new Response("done", { headers: { ...WITH_ID, ...told } });
    expect(await paid(["--stream"], {}, whole({}))).toEqual({ code: 0, stdout: "done", stderr: note });
    const told = { "x-payment-response": btoa(JSON.stringify({ success: true, transaction: "0x1" })) };
    expect(await paid(["--stream"], {}, whole(told))).toEqual({ code: 0, stdout: "done", stderr: "" });
  });
});

test("--json prints no character that could control a terminal, and keeps what it stands for", async () => {
  const text = "\u0000\u001b[2J\u007f\u009b2J\u0085\u202e\u2028\u{e0001}é😀";
  const { code, stdout } = await runOdd([AGENT, "--json"], polls({ ...ENDED, note: text }));
  expect(code).toBe(0);
  expect(stdout.replaceAll("\n", "")).not.toMatch(/[\p{Cc}\p{Cf}\u2028\u2029]/u);
  expect(stdout).toContain("é😀");
  expect(JSON.parse(stdout).note).toBe(text);
});

describe("where there is no gateway", () => {
  const told = async (url: string, why: string) => {
    const { code, stdout, stderr } = await runAt(url, ["echo"]);
    expect({ url, code, stdout, stderr }).toEqual({ url, code: 3, stdout: "", stderr: expect.stringContaining(why) });
  };

  test("what to do is told: where nothing listens, and where http and https are confused", async () => {
    await told(
      "http://127.0.0.1:1",
      "nothing listens at http://127.0.0.1:1: start the gateway (tollgate serve), or name another one with --url\n",
    );
    const plain = startUpstream(() => new Response("?"));
    const mail = startRawUpstream((connection) => connection.write("220 mail.test ESMTP\r\n"));
    const secret = Bun.serve({
      ...{ hostname: "127.0.0.1", port: 0, fetch: () => new Response("?") },
      tls: { cert: SERVER.cert, key: SERVER.key },
    });
    try {
      await told(`http://127.0.0.1:${mail.port}`, "InvalidHTTPResponse: check --url");
      await told(`https://127.0.0.1:${plain.port}`, "it may speak plain http: --url http://");
      await told(`https://127.0.0.1:${secret.port}`, "TOLLGATE_CA_FILE");
      await told(`http://127.0.0.1:${secret.port}`, "it may speak https: --url https://");
    } finally {
      await Promise.all([plain.stop(), secret.stop(true), mail.stop()]);
    }
  });

  test("what answers is told to be none, in whatever form it answers", async () => {
    const answers: readonly (() => Response)[] = [
      () => new Response("<h1>It works</h1>", { headers: { "content-type": "text/html" } }),
      () => new Response("<h1>Not found</h1>", { status: 404 }),
      () => Response.json({ message: "Not Found" }, { status: 404 }),
      () => Response.json({ error: "Not Found" }, { status: 404 }),
      () => Response.json({ message: "Who are you?" }, { status: 401 }),
      () => new Response(null, { status: 401 }),
      () => Response.json({ ok: true }),
      () => new Response(null, { status: 204 }),
    ];
    for (const answer of answers) {
      const ended = await runOdd(["echo"], answer);
      expect([ended.code, ended.stdout]).toEqual([3, ""]);
      expect(ended.stderr).toContain(`it answered ${answer().status}`);
      expect(ended.stderr).toMatch(/^tollgate call: http:\S+ is not a tollgate gateway: check --url \(/);
      expect(ended.stderr).not.toContain("the token has expired");
    }
  });

  test("a path that is not the gateway's base is named", async () => {
    await using gateway = await startGateway();
    const token = await gateway.token({ tenant: "acme", user: "me" });
    for (const name of ["echo", AGENT]) {
      const { code, stderr } = await runAt(`${gateway.url}/v1`, [name], token);
      expect(code).toBe(3);
      expect(stderr).toContain("--url has the path /v1, so /v1/v1/… was asked for: check it");
    }
  });
});
