// A thread finds what the same function finds here, and gives the memory back.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { silentLog } from "../core/log.ts";
import { bodyOf, bodyPartsOf, hashOf, judged, type LargeBody, PART_BYTES, SHA256 } from "../wire/body.ts";
import { parseJson, readJson } from "../wire/json.ts";
import { parseRpcMessages, parseRpcRequest, RPC_MESSAGES, RPC_REQUEST } from "../wire/jsonrpc.ts";
import { startComputeThreads } from "./threads.ts";

const same = (value: unknown) => value;

let stop: () => void;
beforeAll(() => {
  stop = startComputeThreads(silentLog);
});
afterAll(() => stop());

const call = (argument: string) =>
  Buffer.from(`{"jsonrpc":"2.0","id":"7","method":"tools/call","params":{"name":"x","arguments":{"a":"${argument}"}}}`);
/** Copies, since what is judged on a thread moves there. */
const partsOf = (bytes: Uint8Array) => bodyPartsOf(bytes).map((part) => Uint8Array.from(part));

test("a large request is judged and hashed on a thread, and is here again afterwards, in one piece", async () => {
  for (const size of [70_000, PART_BYTES, 5 * PART_BYTES]) {
    const bytes = call("x".repeat(size));
    const body = bodyOf(partsOf(bytes)) as LargeBody;
    const given = body.parts;
    const hash = await hashOf(body, "t");
    expect(hash).toBe(SHA256.run([bytes]).result);
    expect(given.map(({ byteLength }) => byteLength)).toEqual(given.map(() => 0));
    expect(body.parts.length).toBe(given.length);
    const [request, whole] = await judged(body, RPC_REQUEST, "t");
    expect(request).toEqual(parseRpcRequest(bytes));
    expect(Buffer.compare(whole, bytes)).toBe(0);
    expect(Buffer.compare(Buffer.concat(bodyPartsOf(body)), bytes)).toBe(0);
    expect((await judged(body, RPC_MESSAGES, "t"))[0]).toEqual(parseRpcMessages(bytes));
  }
});

test("many bodies at once are each judged by themselves", async () => {
  const all = Array.from({ length: 40 }, (_, at) => call(String(at).repeat(70_000)));
  const found = await Promise.all(all.map((bytes, at) => judged(bodyOf(partsOf(bytes)), RPC_REQUEST, `t${at % 3}`)));
  for (const [at, [request, whole]] of found.entries()) {
    expect(request).toEqual(parseRpcRequest(all[at]!));
    expect(Buffer.compare(whole, all[at]!)).toBe(0);
  }
});

test("a long text is read and refused as it is here", async () => {
  const long = (text: string) => Buffer.from(`${" ".repeat(70_000)}${text}`);
  for (const text of ['{"a":[1e3,"\\ud800"],"__proto__":{"b":null}}', '{"f":{"a":1,"b":2,"a":3}}']) {
    expect(await readJson(long(text), "f", "t", same)).toEqual(parseJson(Buffer.from(text), "f"));
  }
  expect(await readJson(long('{"a":1,"a":2}'), "f", "t", same).catch((error) => error)).toMatchObject({
    ...{ name: "Fault", kind: "invalid_request", message: "a: given twice" },
  });
});

test("a body is never taken for an empty one while a thread has its memory", async () => {
  const body = bodyOf(partsOf(call("x".repeat(70_000)))) as LargeBody;
  const hashing = hashOf(body, "t");
  const lost = { kind: "unavailable", message: "the body was lost" };
  expect(await hashOf(body, "t").catch((error) => error)).toMatchObject(lost);
  expect(() => bodyPartsOf(body)).toThrow("the body was lost");
  expect(await hashing).toBe(SHA256.run(bodyPartsOf(body)).result);
});
