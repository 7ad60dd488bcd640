// The floors, as a process of its own: a bare Bun.serve that reads the body, stores it in a group and answers 202 (one row,
// and on Postgres all rows that an accept of the gateway writes); and with an upstream, the bare prototype of the whole
// job: the call is claimed, handed to one worker in batches, made, and its answer is recorded, all of it durably. Nothing
// else is done: no tenants, checks or limits, and in the prototype no history or totals.
// Arguments: a directory or the URL of a Postgres database, and the upstream's URL. Prints its port; GET tells how many
// calls have not ended.
import { type FloorCall, openFloorStore } from "./floor-store.ts";

/** As many as the gateway makes for one agent and worker when that is all there is. */
const CALLS_AT_ONCE = 128;

async function main([place = ".", upstream]: readonly string[]): Promise<void> {
  const store = await openFloorStore(place, upstream === undefined ? "accepts" : "calls");
  const queue: FloorCall[] = [];
  let running = 0;
  let outgoing: FloorCall[] = [];
  const worker = upstream === undefined ? null : new Worker(import.meta.url);
  worker?.postMessage(upstream);

  function hand(call: FloorCall): void {
    if (outgoing.push(call) > 1) return;
    setImmediate(() => {
      worker?.postMessage(outgoing);
      outgoing = [];
    });
  }

  function next(): void {
    while (running < CALLS_AT_ONCE) {
      const call = queue.shift();
      if (call === undefined) return;
      running++;
      void store.claim(call).then(() => hand(call));
    }
  }

  if (worker !== null) {
    worker.onmessage = ({ data }: MessageEvent<FloorCall[]>) => {
      for (const answer of data) {
        void store.finish(answer).then(() => {
          running--;
          next();
        });
      }
    };
  }

  const server = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    async fetch(request) {
      if (request.method === "GET") return Response.json(queue.length + running);
      const call = { id: Bun.randomUUIDv7(), body: await request.bytes() };
      await store.accept(call);
      if (worker !== null) {
        queue.push(call);
        next();
      }
      return Response.json({ invocation_id: call.id }, { status: 202 });
    },
  });
  process.stdout.write(`${server.port}\n`);
}

declare const self: Worker;

/** The first message is the upstream's URL, and each further one a batch of calls. */
function work(): void {
  let upstream: string | null = null;
  let answers: FloorCall[] = [];

  async function make({ id, body }: FloorCall, url: string): Promise<void> {
    const headers = { "content-type": "application/json" };
    const response = await fetch(url, { method: "POST", headers, body: body as Uint8Array<ArrayBuffer> });
    if (answers.push({ id, body: await response.bytes() }) > 1) return;
    setImmediate(() => {
      self.postMessage(answers);
      answers = [];
    });
  }

  self.onmessage = ({ data }: MessageEvent<string | FloorCall[]>) => {
    if (typeof data === "string") upstream = data;
    else for (const call of data) if (upstream !== null) void make(call, upstream);
  };
}

if (Bun.isMainThread) await main(Bun.argv.slice(2));
else work();
