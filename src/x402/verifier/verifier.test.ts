// The verifier answers as the recovery itself does, whoever judges: the main thread, a worker, or the main thread after
// the worker died. And a tenant's flood delays nobody else.

import { afterEach, describe, expect, test } from "bun:test";
import fc from "fast-check";
import { recoverTypedDataAddress } from "viem";
import {
  anyAuthorization,
  anyHex,
  anyPrivateKey,
  signed,
  typedData,
} from "../../../test/support/chain/authorizations.ts";
import { BASE } from "../../../test/support/network.ts";
import { silentLog } from "../../core/log.ts";
import { canonicalSignature } from "../eip3009.ts";
import { checkSignature, type SignedAuthorization, type SignedBy } from "../verify.ts";
import { createVerifier, type FromVerifier, type VerifierOptions } from "./verifier.ts";

const WORKER = new URL("./worker.ts", import.meta.url).href;

const closing: (() => void)[] = [];
afterEach(() => {
  for (const close of closing.splice(0)) close();
});

function verifier(options: Partial<VerifierOptions> = {}) {
  const created = createVerifier({ domain: BASE.token.domain, log: silentLog, ...options });
  closing.push(created.close);
  return created;
}

/** The real worker, and what passes between it and the main thread. */
function watched(script = WORKER) {
  const started: Worker[] = [];
  let sent = 0;
  const ready = Promise.withResolvers<void>();
  const spawn = () => {
    const worker = new Worker(script);
    started.push(worker);
    worker.addEventListener("message", ({ data }: MessageEvent<FromVerifier>) => {
      if (data === "ready") ready.resolve();
    });
    const post = worker.postMessage.bind(worker);
    worker.postMessage = (batch: readonly SignedAuthorization[]) => {
      sent += batch.length;
      post(batch);
    };
    return worker;
  };
  return { spawn, ready: ready.promise, sent: () => sent, started };
}

/** A worker that answers when it is told to. */
function standIn() {
  let worker: Worker | null = null;
  const batches: (readonly SignedAuthorization[])[] = [];
  const ends: string[] = [];
  const say = (data: FromVerifier) => worker?.onmessage?.(new MessageEvent("message", { data }));
  return {
    spawn() {
      const made = Object.assign(new EventTarget(), {
        ref() {},
        unref() {},
        postMessage: (batch: readonly SignedAuthorization[]) => void batches.push(batch),
        terminate: () => void ends.push("terminated"),
      });
      worker = made as unknown as Worker;
      return worker;
    },
    isStarted: () => worker !== null,
    ready: () => say("ready"),
    batches,
    ends,
    /** Answers the oldest batch. */
    answer(found: SignedBy = "other") {
      say((batches.shift() ?? []).map(() => found));
    },
    dies: () => worker?.dispatchEvent(new Event("close")),
  };
}

const [ANY] = fc.sample(anyAuthorization, 1);
if (ANY === undefined) throw new Error("no authorization");

async function payments(count: number): Promise<SignedAuthorization[]> {
  const good = await signed(`0x${"41".repeat(32)}`, ANY!);
  return Array.from({ length: count }, (_, at) =>
    at % 2 === 0 ? good : { ...good, authorization: { ...good.authorization, value: BigInt(at) } },
  );
}

const expected = (all: readonly SignedAuthorization[]) => all.map(checkSignature);

/** The turns that are due now have been taken. */
async function turns(): Promise<void> {
  for (let turn = 0; turn < 4; turn++) await new Promise(setImmediate);
}

async function viems({ authorization, signature }: SignedAuthorization): Promise<SignedBy> {
  // What the token refuses in any case is nobody's, though viem recovers it.
  if (canonicalSignature(signature) === null) return "other";
  try {
    const signer = await recoverTypedDataAddress({ ...typedData(authorization), signature });
    return signer.toLowerCase() === authorization.from ? "payer" : "other";
  } catch {
    return "other";
  }
}

const anySigned: fc.Arbitrary<{ made: Promise<SignedAuthorization> }> = fc
  .record({
    key: anyPrivateKey,
    unsigned: anyAuthorization,
    how: fc.constantFrom("good", "good", "value", "payer", "signature"),
    bytes: anyHex(65),
  })
  .map(({ key, unsigned, how, bytes }) => ({
    made: signed(key, unsigned).then(({ domain, authorization, signature }): SignedAuthorization => {
      if (how === "value")
        return { domain, signature, authorization: { ...authorization, value: authorization.value ^ 1n } };
      if (how === "payer") return { domain, signature, authorization: { ...authorization, from: unsigned.from } };
      return { domain, authorization, signature: how === "signature" ? bytes : signature };
    }),
  }));

test("many are judged by a worker, each as viem's recovery judges it", async () => {
  const worker = watched();
  const { signedBy } = verifier({ spawn: worker.spawn });
  const first = await payments(64);
  expect(await Promise.all(first.map((each) => signedBy("a", each)))).toEqual(expected(first));
  await worker.ready;
  await fc.assert(
    fc.asyncProperty(fc.array(anySigned, { minLength: 8, maxLength: 24 }), async (samples) => {
      const all = await Promise.all(samples.map(({ made }) => made));
      const before = worker.sent();
      const found = await Promise.all(all.map((each, at) => signedBy(at % 3 === 0 ? "a" : "b", each)));
      expect(found).toEqual(await Promise.all(all.map(viems)));
      // The only one of a tenant is judged here.
      expect(worker.sent() - before).toBeGreaterThanOrEqual(all.length - 2);
    }),
    { numRuns: 20 },
  );
  expect(worker.started.length).toBe(1);
});

test("what can't be judged throws what judging throws, and spoils nothing beside it", async () => {
  const worker = watched();
  const { signedBy } = verifier({ spawn: worker.spawn });
  const all = await payments(32);
  await Promise.all(all.map((each) => signedBy("a", each)));
  await worker.ready;
  const formless = { ...all[0]!, authorization: { ...all[0]!.authorization, value: 1n << 256n } };
  const results = await Promise.allSettled([...all, formless, ...all].map((each) => signedBy("a", each)));
  const bad = results[all.length];
  expect(bad?.status === "rejected" && bad.reason instanceof TypeError).toBe(true);
  const good = results.flatMap((result) => (result.status === "fulfilled" ? [result.value] : []));
  expect(good).toEqual(expected([...all, ...all]));
});

test("one alone, and a few, are judged without a worker", async () => {
  const worker = standIn();
  const { signedBy } = verifier({ spawn: worker.spawn });
  const all = await payments(4);
  for (const each of all) expect(await signedBy("a", each)).toBe(checkSignature(each));
  expect(await Promise.all(all.map((each) => signedBy("a", each)))).toEqual(expected(all));
  expect(worker.isStarted()).toBe(false);
});

test("while a tenant floods a worker, another's only payment is judged at once, and its many take turns", async () => {
  const worker = standIn();
  const { signedBy } = verifier({ spawn: worker.spawn });
  const all = await payments(200);
  const loud = Promise.all(all.map((each) => signedBy("loud", each)));
  worker.ready();
  await turns();
  // The worker has not answered anything yet.
  expect(await signedBy("quiet", all[0]!)).toBe("payer");
  let ended = 0;
  const few = all.slice(0, 3).map((each) => signedBy("quiet", each).then(() => ended++));
  await turns();
  for (let batch = 0; batch < 3; batch++) {
    worker.answer();
    await turns();
  }
  expect(ended).toBe(3);
  await Promise.all(few);
  worker.dies();
  await loud;
});

test("no more wait than there are places, and a tenant that takes many leaves some to others", async () => {
  const worker = standIn();
  const { signedBy } = verifier({ spawn: worker.spawn, waitingMax: 64 });
  const all = await payments(100);
  const loud = all.map((each) => signedBy("loud", each));
  worker.ready();
  const quiet = all.slice(0, 3).map((each) => signedBy("quiet", each));
  worker.dies();
  const results = await Promise.allSettled(loud);
  const refused = results.flatMap((result) => (result.status === "rejected" ? [result.reason] : []));
  expect(refused.length).toBe(100 - 56);
  for (const reason of refused) expect(reason).toMatchObject({ kind: "unavailable", retryAfterSeconds: 1 });
  expect(await Promise.all(quiet)).toEqual(expected(all.slice(0, 3)));
  // The places are free again.
  const again = all.slice(0, 50);
  expect(await Promise.all(again.map((each) => signedBy("loud", each)))).toEqual(expected(again));
});

const script = (code: string) => URL.createObjectURL(new Blob([code]));

describe("nothing is lost with a worker that", () => {
  const deaths: [string, string][] = [
    ["can't be loaded", "./no-such-worker.ts"],
    ["throws while it loads", script(`throw new Error("planted")`)],
    ["throws at its work", script(`self.onmessage = () => { throw new Error("planted"); }; postMessage("ready");`)],
    ["exits at its work", script(`self.onmessage = () => process.exit(1); postMessage("ready");`)],
    ["never gets ready", script("")],
    ["never answers", script(`self.onmessage = () => {}; postMessage("ready");`)],
  ];
  test.each(deaths)("%s", async (_name, url) => {
    const worker = watched(url);
    const { signedBy } = verifier({ spawn: worker.spawn, stuckMs: 200 });
    const all = await payments(100);
    expect(await Promise.all(all.map((each) => signedBy("a", each)))).toEqual(expected(all));
    // Nobody starts one after the other.
    expect(await Promise.all(all.map((each) => signedBy("a", each)))).toEqual(expected(all));
    expect(worker.started.length).toBe(1);
  });
});

test("a worker with nothing to do ends, and the next flood has another one", async () => {
  const worker = standIn();
  const { signedBy } = verifier({ spawn: worker.spawn, idleMs: 1 });
  const all = await payments(20);
  for (let flood = 1; flood <= 2; flood++) {
    const found = all.map((each) => signedBy("a", each));
    worker.ready();
    await turns();
    while (worker.batches.length > 0) worker.answer("payer");
    await Promise.all(found);
    while (worker.ends.length < flood) await new Promise(setImmediate);
  }
  expect(worker.ends).toEqual(["terminated", "terminated"]);
});
