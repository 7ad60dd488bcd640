// Answers in an encoding: which are taken, on both paths, and that what their decoders hold is shared out and bounded.
import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import zlib from "node:zlib";
import { contract, type Tenant } from "./contract.ts";

const MIB = 1024 * 1024;
const TEXT = "tollgate ".repeat(5000);

/** Of unknown length, so that its window is as large as this says; not over yet, unless it is ended. */
async function zstd(windowLog: number, content: string | Uint8Array = TEXT, isEnded = true): Promise<Uint8Array> {
  const encoder = zlib.createZstdCompress({ params: { [zlib.constants.ZSTD_c_windowLog]: windowLog } });
  const parts: Buffer[] = [];
  encoder.on("data", (part: Buffer) => parts.push(part));
  encoder.write(content);
  await new Promise<void>((resolve) => (isEnded ? encoder.end(resolve) : encoder.flush(resolve)));
  if (isEnded) await new Promise<void>((resolve) => encoder.once("end", resolve));
  return Buffer.concat(parts);
}

function largeBrotli(): Uint8Array {
  const { BROTLI_PARAM_LARGE_WINDOW, BROTLI_PARAM_LGWIN, BROTLI_PARAM_QUALITY } = zlib.constants;
  const params = { [BROTLI_PARAM_LARGE_WINDOW]: 1, [BROTLI_PARAM_LGWIN]: 28, [BROTLI_PARAM_QUALITY]: 5 };
  return zlib.brotliCompressSync(TEXT, { params });
}

/** Stored blocks without content, in a layer around them. */
function nothing(): Uint8Array {
  const header = zlib.gzipSync("").subarray(0, 10);
  return zlib.gzipSync(Buffer.concat([header, Buffer.alloc(8 * MIB, Buffer.from([0, 0, 0, 0xff, 0xff]))]));
}

const REFUSED: [name: string, encoding: string, bytes: () => Uint8Array | Promise<Uint8Array>][] = [
  ["three of them", "gzip, gzip, gzip", () => zlib.gzipSync(zlib.gzipSync(zlib.gzipSync(TEXT)))],
  ["zstd within zstd", "zstd, zstd", () => zlib.zstdCompressSync(zlib.zstdCompressSync(TEXT))],
  ["zstd with a window of 16 MiB", "zstd", () => zstd(24)],
  ["the same behind a frame that is allowed", "zstd", async () => Buffer.concat([await zstd(20, ""), await zstd(24)])],
  ["the same within another", "zstd, gzip", async () => zlib.gzipSync(await zstd(27))],
  ["brotli with a large window", "br", largeBrotli],
  ["much that comes to nothing", "gzip, gzip", nothing],
];

contract(
  (at) => {
    const agentOf = async (tenant: Tenant, encoding: string, bytes: Uint8Array, isHeld = false) => {
      const answer = () => {
        const { readable, writable } = new TransformStream<Uint8Array, Uint8Array>();
        const writer = writable.getWriter();
        writer.write(bytes).catch(() => {});
        if (!isHeld) writer.close().catch(() => {});
        return new Response(readable, {
          headers: { "content-encoding": encoding, "content-type": "text/plain" },
        });
      };
      const { id } = await tenant.agent({ upstream_url: at.upstream(answer).url });
      return String(id);
    };

    describe("an encoding that is not taken", () => {
      test.each(REFUSED)(
        "fails the call as internal, and is a 502 when it is streamed: %s",
        async (_name, encoding, bytes) => {
          const tenant = at.tenant();
          const id = await agentOf(tenant, encoding, await bytes());
          const failed = { status: "failed", error_class: "internal", upstream_status: 200 };
          expect(await tenant.invoke(id)).toMatchObject(failed);
          const answer = await tenant.send("POST", `/v1/proxy/${id}/stream`, { json: {} });
          expect([answer.status, Object.keys(answer.body)]).toEqual([502, ["error"]]);
          const invocation = answer.headers.get("x-service-invocation-id") ?? "";
          expect(await tenant.detail(invocation)).toMatchObject({ ...failed, mode: "streaming" });
        },
      );
    });

    test.each([
      ["bytes of no gzip", "gzip", () => Buffer.from(TEXT)],
      [
        "gzip with another checksum",
        "gzip",
        () => Buffer.concat([zlib.gzipSync(TEXT).subarray(0, -8), Buffer.alloc(8)]),
      ],
      ["gzip that breaks off", "gzip", () => zlib.gzipSync(TEXT).subarray(0, -20)],
      ["bytes of no brotli", "br", () => Buffer.from(TEXT)],
    ])("a broken answer in an encoding that is taken ends as one that breaks off: %s", async (_, encoding, bytes) => {
      const tenant = at.tenant();
      const view = await tenant.invoke(await agentOf(tenant, encoding, bytes()));
      expect(view).toMatchObject({ status: "failed", error_class: "upstream_5xx", upstream_status: 200 });
    });

    describe("an encoding that is taken", () => {
      test("may be two, one of them zstd with a window of 8 MiB", async () => {
        const tenant = at.tenant();
        const id = await agentOf(tenant, "zstd, br", zlib.brotliCompressSync(await zstd(23)));
        const view = await tenant.invoke(id);
        expect(Buffer.from(view.response_body_b64, "base64").toString()).toBe(TEXT);
        expect((await tenant.send("POST", `/v1/proxy/${id}/stream`, { json: {} })).text).toBe(TEXT);
      });
    });

    describe("the memory of decoders", () => {
      const rss = () => {
        const status = readFileSync(`/proc/${at.gateway.pid}/status`, "latin1");
        return (Number(/VmRSS:\s+(\d+)/.exec(status)?.[1]) * 1024) / MIB;
      };

      test("is bounded, whatever many open answers ask for, and another tenant finds some", async () => {
        const [greedy, other] = [at.tenant(), at.tenant()];
        // Each fills its window of 8 MiB by some hundred bytes, and stays open.
        const filling = await zstd(23, new Uint8Array(9 * MIB), false);
        const ended = await agentOf(other, "zstd", await zstd(23));
        const stop = new AbortController();
        const streamed: Promise<unknown>[] = [];
        for (let agent = 0; agent < 2; agent++) {
          const id = await agentOf(greedy, "zstd", filling, true);
          for (let call = 0; call < 60; call++) {
            const sending = { json: {}, signal: stop.signal };
            streamed.push(greedy.send("POST", `/v1/proxy/${id}/stream`, sending).catch(() => {}));
          }
          await Promise.all(Array.from({ length: 60 }, () => greedy.call(id)));
        }
        for (let time = 0; time < 3; time++) {
          expect(await other.invoke(ended)).toMatchObject({ status: "succeeded" });
          const answer = await other.send("POST", `/v1/proxy/${ended}/stream`, { json: {} });
          expect([answer.status, answer.text.length]).toEqual([200, TEXT.length]);
          expect(rss()).toBeLessThan(700);
        }
        stop.abort();
        await Promise.all(streamed);
      });

      test("is waited for by an honest user of much of it", async () => {
        const tenant = at.tenant();
        const id = await agentOf(tenant, "zstd", await zstd(23, new Uint8Array(16 * MIB)));
        const views = await Promise.all(Array.from({ length: 60 }, () => tenant.invoke(id)));
        expect(views.map(({ status }) => status)).toEqual(views.map(() => "succeeded"));
        expect(rss()).toBeLessThan(700);
      });
    });
  },
  { TOLLGATE_UPSTREAM_TIMEOUT_MS: "20000" },
);
