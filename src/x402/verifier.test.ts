// The verifier answers as the recovery itself does, whoever judges: the main thread, another, or the main thread after
// the other died. And a tenant's flood delays nobody else.
import { afterEach, describe, expect, test } from "bun:test";
import fc from "fast-check";
import { recoverTypedDataAddress } from "viem";
import { anyAuthorization, anyHex, anyPrivateKey, signed, typedData } from "../../test/support/chain/authorizations.ts";
import { BASE } from "../../test/support/network.ts";
import { silentLog } from "../core/log.ts";
import { startCompute, type ToComputeThread } from "../kernel/compute.ts";
import { canonicalSignature } from "./eip3009.ts";
import { checkSignature, createVerifier, type SignedAuthorization, type SignedBy } from "./verify.ts";

const WORKER = new URL("../compute/worker.ts", import.meta.url).href;

let stop: (() => void) | null = null;
afterEach(() => {
  stop?.();
  stop = null;
});

/** Threads that judge signatures, as the product's do, with a count of what they are given. */
function threads(script = WORKER) {
  let sent = 0;
  const spawn = () => {
    const worker = new Worker(script);
    const post = worker.postMessage.bind(worker);
    worker.postMessage = (...message: unknown[]) => {
      sent++;
      (post as (...message: unknown[]) => void)(...message);
    };
    return worker;
  };
  stop?.();
  stop = startCompute({ log: silentLog, spawn, stuckMs: 200 });
  return { sent: () => sent };
}

/** A thread that answers when it is told to. */
function standIn() {
  const given: ToComputeThread[] = [];
  let worker: Worker | null = null;
  const spawn = () => {
    worker = Object.assign(new EventTarget(), {
      ...{ ref() {}, unref() {}, terminate() {} },
      postMessage: (message: ToComputeThread) => void given.push(message),
    }) as unknown as Worker;
    return worker;
  };
  stop = startCompute({ log: silentLog, spawn, threads: 1 });
  return {
    given,
    answer(output: SignedBy) {
      given.shift();
      worker?.onmessage?.(new MessageEvent("message", { data: { output } }));
    },
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

test("many are judged on threads, each as viem's recovery judges it", async () => {
  const { sent } = threads();
  const { signedBy } = createVerifier(BASE.token.domain);
  const first = await payments(64);
  expect(await Promise.all(first.map((each) => signedBy("a", each)))).toEqual(expected(first));
  await fc.assert(
    fc.asyncProperty(fc.array(anySigned, { minLength: 8, maxLength: 24 }), async (samples) => {
      const all = await Promise.all(samples.map(({ made }) => made));
      const before = sent();
      const found = await Promise.all(all.map((each, at) => signedBy(at % 3 === 0 ? "a" : "b", each)));
      expect(found).toEqual(await Promise.all(all.map(viems)));
      // A few are judged here.
      expect(sent() - before).toBeGreaterThanOrEqual(all.length - 5);
    }),
    { numRuns: 20 },
  );
});

test("what can't be judged throws what judging throws, and spoils nothing beside it", async () => {
  threads();
  const { signedBy } = createVerifier(BASE.token.domain);
  const all = await payments(32);
  const formless = { ...all[0]!, authorization: { ...all[0]!.authorization, value: 1n << 256n } };
  const results = await Promise.allSettled([...all, formless, ...all].map((each) => signedBy("a", each)));
  const bad = results[all.length];
  expect(bad?.status === "rejected" && bad.reason instanceof TypeError).toBe(true);
  const good = results.flatMap((result) => (result.status === "fulfilled" ? [result.value] : []));
  expect(good).toEqual(expected([...all, ...all]));
});

test("one alone, and a few, are judged without another thread", async () => {
  const { sent } = threads();
  const { signedBy } = createVerifier(BASE.token.domain);
  const all = await payments(4);
  for (const each of all) expect(await signedBy("a", each)).toBe(checkSignature(each));
  expect(await Promise.all(all.map((each) => signedBy("a", each)))).toEqual(expected(all));
  expect(sent()).toBe(0);
});

test("while a tenant floods the threads, another's only payment is judged at once, and its many take turns", async () => {
  const thread = standIn();
  const { signedBy } = createVerifier(BASE.token.domain);
  const all = await payments(200);
  const loud = Promise.all(all.map((each) => signedBy("loud", each)));
  await turns();
  // The thread has not answered anything yet.
  expect(await signedBy("quiet", all[0]!)).toBe("payer");
  let ended = 0;
  const few = all.slice(0, 3).map((each) => signedBy("quiet", each).then(() => ended++));
  await turns();
  for (let answers = 0; answers < 5; answers++) {
    thread.answer("other");
    await turns();
  }
  expect(ended).toBe(3);
  await Promise.all(few);
  // What the threads have not done by their end is done here.
  stop?.();
  await loud;
});

test("no more wait than there are places, and a tenant that takes many leaves some to others", async () => {
  standIn();
  const { signedBy } = createVerifier(BASE.token.domain, 64);
  const all = await payments(100);
  const loud = all.map((each) => signedBy("loud", each));
  const quiet = all.slice(0, 3).map((each) => signedBy("quiet", each));
  stop?.();
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

describe("nothing is lost with threads that", () => {
  const deaths: [string, string][] = [
    ["can't be loaded", "./no-such-worker.ts"],
    ["throw while they load", script(`throw new Error("planted")`)],
    ["throw at their work", script(`self.onmessage = () => { throw new Error("planted"); };`)],
    ["exit at their work", script("self.onmessage = () => process.exit(1);")],
    ["never answer", script("self.onmessage = () => {};")],
  ];
  test.each(deaths)("%s", async (_name, url) => {
    threads(url);
    const { signedBy } = createVerifier(BASE.token.domain);
    const all = await payments(20);
    expect(await Promise.all(all.map((each) => signedBy("a", each)))).toEqual(expected(all));
  });
});
