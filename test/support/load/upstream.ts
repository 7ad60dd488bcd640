// An upstream that keeps book of every call that reaches it. Each call's body has a number that its caller gave it, so that
// two calls of one number show, whatever the gateway thought that they were.
import { startUpstream, type Upstream } from "../http/upstream.ts";

const [EVENTS, EVENT_EVERY_MS] = [5, 60];

export interface CountingUpstream extends Upstream {
  /** The invocations that have brought a call of this number, in the order of their arrival. */
  of(n: number): readonly string[];
  /** Every invocation that has come here, and how often. */
  readonly visits: ReadonlyMap<string, number>;
}

/** Answers `/slow` after `slowMs`, `/stream` in events, and everything else at once. */
export function startCountingUpstream(slowMs = 2_000): CountingUpstream {
  const visits = new Map<string, number>();
  const byNumber = new Map<number, string[]>();
  const upstream = startUpstream(async (request) => {
    const invocation = request.headers.get("x-service-invocation-id") ?? "";
    const { n } = (await request.json()) as { n: number };
    visits.set(invocation, (visits.get(invocation) ?? 0) + 1);
    byNumber.set(n, [...(byNumber.get(n) ?? []), invocation]);
    const { pathname } = new URL(request.url);
    if (pathname === "/slow") await Bun.sleep(slowMs);
    return pathname === "/stream" ? events(n) : Response.json({ n });
  });
  return { ...upstream, of: (n) => byNumber.get(n) ?? [], visits };
}

function events(n: number): Response {
  const stream = async function* () {
    for (let i = 0; i < EVENTS; i++) {
      yield `data: {"n":${n},"i":${i}}\n\n`;
      await Bun.sleep(EVENT_EVERY_MS);
    }
  };
  return new Response(stream() as unknown as ReadableStream, { headers: { "content-type": "text/event-stream" } });
}
