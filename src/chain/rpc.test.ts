import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { outbound } from "../../test/support/chain/wallet.ts";
import { BASE } from "../../test/support/network.ts";
import type { Log, LogFields } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { quantity, RpcError } from "./json-rpc.ts";
import { createRpc, StaleNode } from "./rpc.ts";

type Answer = (call: { id: number; method: string }) => Response | Promise<Response> | object;

/** A node that answers as it is told; it counts what it was asked. */
function startNode(answer: Answer) {
  const node = { answer, asked: [] as string[], chainId: "0x2105" };
  const server = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    async fetch(request) {
      const call = (await request.json()) as { id: number; method: string };
      if (call.method === "eth_chainId" && node.chainId !== "") {
        return Response.json({ jsonrpc: "2.0", id: call.id, result: node.chainId });
      }
      node.asked.push(call.method);
      const given = await node.answer(call);
      return given instanceof Response ? given : Response.json({ jsonrpc: "2.0", id: call.id, ...given });
    },
  });
  nodes.push(server);
  return Object.assign(node, { url: `http://127.0.0.1:${server.port}/v1/secret-api-key` });
}

const nodes: { stop(force: boolean): unknown }[] = [];
let lines: { event: string; fields: LogFields }[] = [];
const write = (event: string, fields: LogFields = {}) => void lines.push({ event, fields });
const log: Log = { debug: write, info: write, warn: write, error: write };
let errors: number[] = [];

interface Server {
  readonly url: string;
}

const connectFor = (timeoutMs: number, servers: readonly Server[]) =>
  createRpc({
    network: BASE,
    urls: servers.map(({ url }) => url),
    outbound,
    log,
    onError: (index) => errors.push(index),
    timeoutMs,
  });
/** Long enough for a node that answers, on a busy machine too. */
const connect = (...servers: Server[]) => connectFor(5_000, servers);
const BRIEF_MS = 300;
/** For nodes of which one hangs. */
const connectBriefly = (...servers: Server[]) => connectFor(BRIEF_MS, servers);
const question = { method: "eth_test", params: [], read: quantity };
const result = (value: unknown) => () => ({ result: value });
const failure = (code: number, message: string) => () => ({ error: { code, message } });
const hang = () => new Promise<Response>(() => {});

beforeEach(() => {
  lines = [];
  errors = [];
});
afterEach(() => {
  for (const node of nodes.splice(0)) node.stop(true);
});

describe("the nodes of the configuration", () => {
  test("are not asked beyond the first when that one works", async () => {
    const [first, second] = [startNode(result("0x1")), startNode(result("0x2"))];
    const rpc = connect(first, second);
    expect(await rpc.ask(question)).toBe(1n);
    expect(await rpc.ask(question)).toBe(1n);
    expect(second.asked).toEqual([]);
    expect(errors).toEqual([]);
  });

  const broken: [string, Answer][] = [
    ["hangs", hang],
    ["is overloaded", () => new Response("busy", { status: 429 })],
    ["has a server error", () => new Response("oops", { status: 502 })],
    ["sends HTML", () => new Response("<html>")],
    ["sends a result of another form", result("one")],
    ["sends no result", () => ({})],
    ["answers another request", () => Response.json({ jsonrpc: "2.0", id: -7, result: "0x9" })],
    ["speaks another protocol", ({ id }) => Response.json({ id, result: "0x9" })],
    ["sends a list", () => Response.json([])],
    ["sends too much", () => new Response("x".repeat(5_000_000))],
    ["redirects", () => Response.redirect("http://127.0.0.1:1/", 307)],
    ["has an internal error", failure(-32_603, "internal error")],
    ["limits the rate", failure(-32_005, "limit exceeded")],
    ["lacks the block", failure(-32_000, "header not found")],
    ["lacks the method", failure(-32_601, "method not found")],
  ];
  test.each(broken)("are passed over: one that %s", async (_, answer) => {
    const [first, second] = [startNode(answer), startNode(result("0x2"))];
    const rpc = (answer === hang ? connectBriefly : connect)(first, second);
    expect(await rpc.ask(question)).toBe(2n);
    expect(errors).toEqual([0]);
  });

  test.each(broken)("are unavailable together, when the only one %s", async (_, answer) => {
    const error = await (answer === hang ? connectBriefly : connect)(startNode(answer))
      .ask(question)
      .catch((thrown) => thrown);
    expect(error).toMatchObject({ kind: "unavailable", message: "rpc unreachable" });
    expect(error.retryAfterSeconds).toBeGreaterThan(0);
  });

  test("give an error that is an answer, and no other node is asked then", async () => {
    const [first, second] = [startNode(failure(3, "execution reverted: no")), startNode(result("0x2"))];
    const asked = { ...question, isAnswer: (error: RpcError) => error.code === 3 };
    await expect(connect(first, second).ask(asked)).rejects.toThrow("execution reverted: no");
    expect(second.asked).toEqual([]);
    expect(errors).toEqual([]);
  });

  test("are passed over when they lie behind, and without another one that is the answer", async () => {
    const [first, second] = [startNode(result("0x1")), startNode(result("0x2"))];
    const read = (value: unknown) => {
      if (quantity(value) < 2n) throw new StaleNode("behind");
      return quantity(value);
    };
    expect(await connect(first, second).ask({ ...question, read })).toBe(2n);
    await expect(connect(first).ask({ ...question, read })).rejects.toThrow(StaleNode);
  });
});

describe("an endpoint that failed", () => {
  test("is left aside, tested beside, and used again when it works", async () => {
    const [first, second] = [startNode(hang), startNode(result("0x2"))];
    const rpc = connectBriefly(first, second);
    expect(await rpc.ask(question)).toBe(2n);
    for (let times = 0; times < 10; times++) expect(await rpc.ask(question)).toBe(2n);
    expect(first.asked).toHaveLength(1);
    first.answer = result("0x1");
    const end = performance.now() + 5000;
    while ((await rpc.ask(question)) !== 1n && performance.now() < end) await Bun.sleep(20);
    expect(await rpc.ask(question)).toBe(1n);
  });

  test("is tried all the same when no other is left", async () => {
    const [first, second] = [startNode(hang), startNode(result("0x2"))];
    const rpc = connectBriefly(first, second);
    expect(await rpc.ask(question)).toBe(2n);
    first.answer = result("0x1");
    second.answer = hang;
    expect(await rpc.ask(question)).toBe(1n);
  });

  test("is named by its place; its URL is in no error and no line of the log", async () => {
    const rpc = connectBriefly(startNode(hang), { url: "http://key-in-the-name.invalid/secret-api-key" });
    const error = await rpc.ask(question).catch((thrown) => thrown);
    const told = `${Bun.inspect(error)} ${Bun.inspect(error.cause)} ${Bun.inspect(lines)}`;
    expect(told).not.toContain("secret-api-key");
    expect(told).not.toContain("key-in-the-name");
    expect(lines.map(({ fields }) => fields["endpoint"])).toContain(0);
    expect(lines.map(({ fields }) => fields["endpoint"])).toContain(1);
  });
});

describe("the chain ID", () => {
  test("stops the start when it is another chain's, and the endpoint is named by its place", async () => {
    const [first, second] = [startNode(result("0x1")), startNode(result("0x2"))];
    second.chainId = "0x1";
    const error = await connect(first, second)
      .check()
      .catch((thrown) => thrown);
    expect(error).toBeInstanceOf(StartupProblem);
    // As the log and the metrics count.
    expect(error.message).toContain("endpoint 1 (counted from 0)");
    expect(error.message).not.toContain("secret");
  });

  test("is asked later of an endpoint that can't be reached at the start, which is never used if it is wrong", async () => {
    const first = startNode(result("0x1"));
    first.chainId = "";
    first.answer = hang;
    const rpc = connectBriefly(first);
    await rpc.check();
    first.chainId = "0x1";
    await expect(rpc.ask(question)).rejects.toMatchObject({ kind: "unavailable" });
    first.answer = result("0x1");
    await expect(rpc.ask(question)).rejects.toMatchObject({ kind: "unavailable" });
    expect(first.asked.filter((method) => method === "eth_test")).toEqual([]);
  });
});

test("a transaction that is told to all nodes counts when one of them takes it", async () => {
  const [first, second] = [startNode(failure(-32_000, "txpool is full")), startNode(result("0x2"))];
  const rpc = connectBriefly(first, second);
  await rpc.check();
  expect(await rpc.askAll(question)).toBe(2n);
  expect(first.asked).toHaveLength(1);
  second.answer = failure(7, "nonce too low");
  const asked = { ...question, isAnswer: (error: RpcError) => error.code === 7 };
  await expect(rpc.askAll(asked)).rejects.toBeInstanceOf(RpcError);
  second.answer = hang;
  await expect(rpc.askAll(asked)).rejects.toMatchObject({ kind: "unavailable" });
});

test("so many questions at once are no fault of the node: none times out waiting for its turn", async () => {
  const node = startNode(async () => {
    await Bun.sleep(150);
    return { result: "0x1" };
  });
  // The last ones wait longer than that for their turn, and are answered in much less.
  const rpc = connectFor(1_000, [node]);
  const answers = await Promise.all(Array.from({ length: 300 }, () => rpc.ask(question)));
  expect(answers).toHaveLength(300);
  expect(errors).toEqual([]);
});
