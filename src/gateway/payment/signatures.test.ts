// What is remembered of a signature holds for that very authorization, signature, payer and tenant, and nothing else.
import { expect, test } from "bun:test";
import fc from "fast-check";
import { anyAuthorization, signed } from "../../../test/support/chain/authorizations.ts";
import type { Payment } from "../../x402/types.ts";
import { checkSignature } from "../../x402/verify.ts";
import { createSignatureCheck } from "./signatures.ts";

async function anyPayment(key: string): Promise<Payment> {
  const unsigned = fc.sample(anyAuthorization, 1)[0]!;
  const { authorization, signature } = await signed(`0x${key.repeat(32)}`, unsigned);
  return { x402Version: 1, scheme: "exact", network: "base", authorization, signature };
}

function counted(max?: number) {
  let judged = 0;
  const check = createSignatureCheck(async (_tenant, payment) => {
    judged++;
    return checkSignature(payment);
  }, max);
  return { check, judged: () => judged };
}

test("a payment that comes again is judged once, a good one and a bad one", async () => {
  const { check, judged } = counted();
  const good = await anyPayment("41");
  const bad = { ...good, authorization: { ...good.authorization, value: good.authorization.value ^ 1n } };
  for (let time = 0; time < 3; time++) {
    expect(await check("acme", good)).toBe("payer");
    expect(await check("acme", bad)).toBe("other");
  }
  expect(judged()).toBe(2);
});

test("what is asked many times at once is judged once, and a refusal is not remembered", async () => {
  let judged = 0;
  let refusal: Error | null = new Error("too many");
  const check = createSignatureCheck(async (_tenant, payment) => {
    judged++;
    await null;
    if (refusal !== null) throw refusal;
    return checkSignature(payment);
  });
  const good = await anyPayment("45");
  const all = () => Promise.allSettled(Array.from({ length: 20 }, () => check("acme", good)));
  expect(new Set((await all()).map(({ status }) => status))).toEqual(new Set(["rejected"]));
  expect(judged).toBe(1);
  refusal = null;
  for (const result of await all()) expect(result).toEqual({ status: "fulfilled", value: "payer" });
  expect(judged).toBe(2);
});

test("whatever differs in a payment, or its tenant, is judged anew", async () => {
  const { check, judged } = counted();
  const good = await anyPayment("42");
  expect(await check("acme", good)).toBe("payer");
  const { authorization, signature } = good;
  const others: Payment[] = [
    { ...good, authorization: { ...authorization, value: authorization.value ^ 1n } },
    { ...good, authorization: { ...authorization, validBefore: authorization.validBefore ^ 1n } },
    { ...good, authorization: { ...authorization, nonce: `0x${"77".repeat(32)}` } },
    { ...good, authorization: { ...authorization, to: `0x${"66".repeat(20)}` } },
    { ...good, authorization: { ...authorization, from: `0x${"55".repeat(20)}` } },
    {
      ...good,
      signature: `${signature.slice(0, -2)}${signature.endsWith("1b") ? "1c" : "1b"}` as Payment["signature"],
    },
  ];
  for (const other of others) expect(await check("acme", other)).toBe("other");
  expect(await check("bolt", good)).toBe("payer");
  expect(judged()).toBe(2 + others.length);
});

test("a tenant that fills the memory displaces its own entries, and not another's", async () => {
  const { check, judged } = counted(8);
  const quiet = await anyPayment("43");
  await check("quiet", quiet);
  const loud = await anyPayment("44");
  for (let value = 0n; value < 30n; value++)
    await check("loud", { ...loud, authorization: { ...loud.authorization, value } });
  const before = judged();
  await check("quiet", quiet);
  expect(judged()).toBe(before);
});
