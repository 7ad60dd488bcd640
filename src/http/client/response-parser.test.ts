import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import { type ResponseHead, ResponseParser, SLICE_BYTES_MAX } from "./response-parser.ts";

const bytesOf = (text: string) => new Uint8Array(Buffer.from(text, "latin1"));
const latin1 = (bytes: Uint8Array) => Buffer.from(bytes).toString("latin1");
const parser = new ResponseParser();

/** What comes of these bytes, which come in slices of these lengths in turn. */
function parsed(text: string, lengths: readonly number[] = [SLICE_BYTES_MAX], method = "POST") {
  const bytes = bytesOf(text);
  parser.begin(method);
  let head: ResponseHead | null = null;
  let body = "";
  let [at, slices] = [0, 0];
  while (at < bytes.length) {
    const length = lengths[slices++ % lengths.length] ?? 1;
    const result = parser.parse(bytes.slice(at, at + length));
    head ??= result.head;
    body += latin1(result.body ?? new Uint8Array());
    at += result.used;
    if (result.state !== "more") return { head, body, state: result.state, left: bytes.length - at };
  }
  return { head, body, state: parser.endsWithConnection ? "open" : "more", left: 0 };
}

const CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
const chunk = (text: string) => `${text.length.toString(16)}\r\n${text}\r\n`;

test("an answer is the same however its bytes come, and so is where it ends", () => {
  const name = fc.stringMatching(/^[A-Za-z][A-Za-z0-9-]{0,20}$/).map((text) => `x-${text}`);
  const value = fc.oneof(fc.stringMatching(/^([!-~]{1,20}( [!-~]{1,8})?)?$/), fc.constant("\xe9\xff"));
  const interim = fc.constantFrom("", "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", "HTTP/1.1 100 \r\n\r\n");
  const parts = fc.array(fc.uint8Array({ minLength: 1, maxLength: 70 }).map(latin1), { maxLength: 30 });
  const slices = fc.array(fc.integer({ min: 1, max: 40 }), { minLength: 1, maxLength: 10 });
  const answers = fc.record({
    fields: fc.array(fc.tuple(name, value), { maxLength: 10 }),
    interim,
    parts,
    isChunked: fc.boolean(),
    slices,
    after: fc.constantFrom("", "HTTP/1.1 200 OK\r\n\r\n", "junk"),
  });
  fc.assert(
    fc.property(answers, ({ fields, interim, parts, isChunked, slices, after }) => {
      const body = parts.join("");
      const framing: [string, string] = isChunked
        ? ["Transfer-Encoding", "chunked"]
        : ["Content-Length", `${body.length}`];
      const all = [...fields, framing];
      const head = `HTTP/1.1 201 Created\r\n${all.map(([n, v]) => `${n}: ${v}\r\n`).join("")}\r\n`;
      const sent = isChunked ? `${parts.map(chunk).join("")}0\r\nX-Trailer: 1\r\n\r\n` : body;
      const text = interim + head + sent;
      const { head: read, left, ...rest } = parsed(text + after, slices);
      expect([read?.status, [...(read?.headers ?? [])]]).toEqual([201, all.map(([n, v]) => [n.toLowerCase(), v])]);
      expect(rest).toEqual({ body, state: "whole" });
      expect(left).toBe(after.length);
    }),
    { numRuns: 300 },
  );
});

describe("bytes that are no answer", () => {
  const fields = (count: number) => "x: y\r\n".repeat(count);
  const long = (count: number) => `x: ${"y".repeat(1_000)}\r\n`.repeat(count);
  test.each([
    ["another protocol", "HTTP/2 200 OK\r\n\r\n", "", "InvalidHTTPResponse"],
    ["text", "hello\r\n\r\n", "", "InvalidHTTPResponse"],
    ["bare line feeds", "HTTP/1.1 200 OK\nContent-Length: 2\n\nok", "", "InvalidHTTPResponse"],
    ["a folded field", "HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n", "", "InvalidHTTPResponse"],
    ["two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", "", "InvalidHTTPResponse"],
    ["chunks and a length", CHUNKED.replace("\r\n\r\n", "\r\nContent-Length: 2\r\n\r\n"), "", "InvalidHTTPResponse"],
    ["a broken chunk", `${CHUNKED}${chunk("hello")}zz\r\n`, "hello", "InvalidHTTPResponse"],
    ["a chunk beyond all sizes", `${CHUNKED}${"f".repeat(17)}\r\n`, "", "InvalidHTTPResponse"],
    ["status 000", "HTTP/1.1 000 OK\r\nContent-Length: 2\r\n\r\nok", "", "InvalidStatus"],
    ["status 600", "HTTP/1.1 600 OK\r\n\r\n", "", "InvalidStatus"],
    ["another protocol, unasked", "HTTP/1.1 101 OK\r\nUpgrade: x\r\n\r\n", "", "InvalidStatus"],
    ["interim answers without end", "HTTP/1.1 100 Continue\r\n\r\n".repeat(101), "", "TooManyInterimAnswers"],
    ["257 fields", `HTTP/1.1 200 OK\r\n${fields(257)}\r\n`, "", "TooManyHeaders"],
    ["257 fields of an interim answer", `HTTP/1.1 100 OK\r\n${fields(257)}\r\n`, "", "TooManyHeaders"],
    ["a head without end", `HTTP/1.1 200 OK\r\nX: ${"y".repeat(70_000)}`, "", "HeadTooLarge"],
    ["a head of blanks without end", `HTTP/1.1 200 OK\r\nX:${" ".repeat(70_000)}`, "", "HeadTooLarge"],
    ["a status without end", `HTTP/1.1 200 ${"O".repeat(70_000)}`, "", "HeadTooLarge"],
    ["a head that ends too late", `HTTP/1.1 200 OK\r\n${long(70)}\r\n`, "", "HeadTooLarge"],
    ["interim heads that are long", `HTTP/1.1 103 OK\r\n${long(30)}\r\n`.repeat(3), "", "HeadTooLarge"],
    ["trailers without end", `${CHUNKED}0\r\n${`X: ${"y".repeat(99)}\r\n`.repeat(3000)}`, "", "HeadTooLarge"],
  ])("end as an error, with all that came before: %s", (_name, text, body, code) => {
    expect(parsed(text)).toMatchObject({ body, state: { code } });
    expect(parsed(text, [1000, 1])).toMatchObject({ body, state: { code } });
  });
});

describe("an answer", () => {
  test.each([
    ["with its head, to HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD", "", "whole", 0],
    ["with its head, when it is 204", "HTTP/1.1 204 OK\r\nContent-Length: 5\r\n\r\nhello", "GET", "", "whole", 5],
    ["with its head, when it is 304", `${CHUNKED.replace("200", "304")}0\r\n\r\n`, "GET", "", "whole", 5],
    ["with its length", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP", "GET", "ok", "whole", 4],
    ["with its last chunk", `${CHUNKED}${chunk("ok")}0\r\n\r\nHTTP`, "GET", "ok", "whole", 4],
    ["with its connection, else", "HTTP/1.0 200 OK\r\n\r\nhello", "GET", "hello", "open", 0],
    ["not before its length", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "GET", "hello", "more", 0],
    ["not before its last chunk", `${CHUNKED}${chunk("hello")}`, "GET", "hello", "more", 0],
    ["not before its head", "HTTP/1.1 200 OK\r\nX:", "GET", "", "more", 0],
  ])("comes to its end %s", (_name, text, method, body, state, left) => {
    expect(parsed(text, undefined, method)).toMatchObject({ body, state, left });
  });

  test("leaves a connection that can be used again, unless it says otherwise", () => {
    const keeps = (text: string) => [parsed(text).state, parser.keepsAlive];
    expect(keeps("HTTP/1.1 204 OK\r\n\r\n")).toEqual(["whole", true]);
    expect(keeps("HTTP/1.1 204 OK\r\nConnection: close\r\n\r\n")).toEqual(["whole", false]);
    expect(keeps("HTTP/1.0 204 OK\r\n\r\n")).toEqual(["whole", false]);
  });
});

test("parsers go on when the memory that they share has grown", () => {
  const answer = (n: number) => new TextEncoder().encode(`HTTP/1.1 200 OK\r\nX-N: ${n}\r\nContent-Length: 0\r\n\r\n`);
  const parsers = Array.from({ length: 20_000 }, () => new ResponseParser());
  for (const n of [0, 10_000, 19_999]) {
    parsers[n]?.begin("GET");
    expect(parsers[n]?.parse(answer(n)).head?.headers.get("x-n")).toBe(String(n));
  }
  for (const parser of parsers) parser.free();
});

test("a head longer than what is taken for text at a time is read alike", () => {
  for (const length of [2000, 2020, 2040, 2048, 3000]) {
    const long = "é".repeat(length);
    const parser = new ResponseParser();
    parser.begin("GET");
    const head = `HTTP/1.1 200 OK\r\nA: ${long}\r\nB: ÿ\r\nContent-Length: 0\r\n\r\n`;
    const { headers } = parser.parse(Buffer.from(head, "latin1")).head ?? {};
    expect([headers?.get("a"), headers?.get("b")]).toEqual([long, "ÿ"]);
    parser.free();
  }
});
