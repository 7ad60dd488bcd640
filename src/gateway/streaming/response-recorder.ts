// Records a streamed answer while it passes: its head, the time of its first byte, its length, the captured start, and
// the hash for the receipt.
import { createHash } from "node:crypto";
import type { Call } from "../../core/call.ts";
import { type ErrorClass, errorClassOf } from "../../core/states.ts";
import type { Answer } from "../../http/client/exchange.ts";
import { MAX } from "../../kernel/limits.ts";
import { createFairShare } from "../../kernel/share.ts";
import { freeMemory } from "../../wire/body.ts";
import type { Ending } from "../invocations/service.ts";

const START_BYTES_FIRST = 4096;
/** When so much of an answer has come, its length is believed. */
const BELIEVED_BYTES = 64 * 1024;

export function createResponseRecorder({ capture, receipt }: Pick<Call, "capture" | "receipt">, memory: TenantBudget) {
  let dialledAt: number | null = null;
  let firstAt: number | null = null;
  let status: number | null = null;
  let contentType: string | null = null;
  let size = 0;
  /** As the answer tells it; of an encoded one no more than a hint. */
  let length = 0;
  let start = new Uint8Array();
  let captured = 0;
  const hash = receipt ? createHash("sha256") : null;

  const since = (from: number | null, to: number | null) =>
    from === null || to === null ? null : Math.max(0, Math.round(to - from));

  /** Makes room for so many bytes, as far as there is any. */
  function grow(wanted: number): void {
    const more = memory.take(wanted - start.length);
    if (more === 0) return;
    const larger = new Uint8Array(start.length + more);
    larger.set(start);
    freeMemory(start);
    start = larger;
  }

  function roomFor(wanted: number): number {
    const ahead = wanted >= BELIEVED_BYTES && length > wanted ? length : 2 * start.length;
    return Math.min(MAX.capturedBytes, Math.max(wanted, ahead, START_BYTES_FIRST));
  }

  function keep(bytes: Uint8Array): void {
    const wanted = Math.min(captured + bytes.length, MAX.capturedBytes);
    // After a gap in the capture nothing belongs to the start any more.
    if (captured < size - bytes.length || wanted <= captured) return;
    if (wanted > start.length) grow(roomFor(wanted));
    const part = bytes.subarray(0, Math.min(wanted, start.length) - captured);
    start.set(part, captured);
    captured += part.length;
  }

  function ending(error_class: ErrorClass | null, isWhole: boolean): Ending {
    const whole = captured === start.length ? start : start.slice(0, captured);
    const response = status !== null && capture ? whole : null;
    memory.giveBack(start.length);
    start = new Uint8Array();
    return {
      status: error_class === null ? "succeeded" : "failed",
      error_class,
      upstream_status: status,
      latency_ms: since(dialledAt, performance.now()),
      ttft_ms: since(dialledAt, firstAt),
      resp_size: status === null ? null : size,
      resp_sha256: isWhole && hash !== null ? hash.digest("hex") : null,
      response,
      response_truncated: response !== null && (!isWhole || size > response.length),
      response_content_type: contentType,
    };
  }

  return {
    /** The first connection is being dialled. */
    dialled() {
      dialledAt ??= performance.now();
    },
    head(response: Answer) {
      status = response.status;
      length = Number(response.headers.get("content-length")) || 0;
      // A longer content type would only fill the record.
      contentType = response.headers.get("content-type")?.slice(0, 256) ?? null;
    },
    /** Called with each piece that goes to the caller. */
    piece(bytes: Uint8Array) {
      if (bytes.length === 0) return;
      firstAt ??= performance.now();
      size += bytes.length;
      hash?.update(bytes);
      if (capture) keep(bytes);
    },
    /** The whole answer has come. */
    whole: () => ending(status === null ? "internal" : errorClassOf(status), true),
    /** It has not come, or only a part of it. */
    broken: (errorClass: ErrorClass) => ending(errorClass, false),
  };
}

export type ResponseRecorder = ReturnType<typeof createResponseRecorder>;

/**
 * Memory that all exchanges share, so that it is bounded however many there are.
 *
 * @returns the share of a tenant
 */
export function createBudget(bytesMax: number) {
  const memory = createFairShare({ size: bytesMax, least: 0 });
  const of = (tenant: string) => ({
    /** Takes as many of the bytes as the tenant may have now, and gives how many those are. */
    take(bytes: number) {
      const taken = Math.min(bytes, memory.roomOf(tenant));
      memory.take(tenant, null, taken);
      return taken;
    },
    giveBack: (bytes: number) => memory.giveBack(tenant, null, bytes),
  });
  return Object.assign(of, { inUse: () => memory.inUse });
}

export type Budget = ReturnType<typeof createBudget>;
export type TenantBudget = ReturnType<Budget>;
