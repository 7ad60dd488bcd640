import { expect, test } from "bun:test";
import { X509Certificate } from "node:crypto";
import { caProblem, issueCa, issueClient, issueServer } from "./certificates.ts";

const DAY_MS = 86_400_000;
const NOW = Date.parse("2026-11-21T12:00:00Z");
const notAfter = (cert: string) => Date.parse(new X509Certificate(cert).validTo);

test("no certificate outlives its CA, and a CA that has expired signs nothing", async () => {
  const ca = await issueCa(NOW);
  const end = notAfter(ca.cert);
  expect(end).toBe(NOW + 3652 * DAY_MS);
  expect(notAfter((await issueClient(ca, "a", end - 398 * DAY_MS)).cert)).toBe(end - DAY_MS);
  expect(notAfter((await issueServer(ca, ["a.test"], end - 30 * DAY_MS)).cert)).toBe(end);
  expect(caProblem(ca, end - 1)).toBeNull();
  expect(caProblem(ca, end)).toBe("the certificate has expired");
});

test("two CAs have names and keys of their own", async () => {
  const [one, two] = [await issueCa(NOW), await issueCa(NOW)];
  expect(new X509Certificate(one.cert).subject).not.toBe(new X509Certificate(two.cert).subject);
  expect(caProblem({ cert: one.cert, key: two.key }, NOW)).toBe("the key is not the certificate's");
});
