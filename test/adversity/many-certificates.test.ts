// One account may have several certificates. However many of them it uses, there is a connection for whoever else
// comes.
import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { addAccount, addCertificate } from "../../src/facilitator/accounts.ts";
import { type Client, head, startPort } from "../support/http/mutual-tls.ts";

/** Gateways start side by side, also on a busy machine. */
setDefaultTimeout(120_000);

const CONNECTIONS = 64;
const CERTIFICATES = 16;

let port: Awaited<ReturnType<typeof startPort>>;
beforeAll(async () => {
  port = await startPort({ connections: CONNECTIONS });
});
afterAll(() => port.stop());

test("an account that opens connections with all its certificates leaves some for the others", async () => {
  const { pki, store, clock } = port;
  const others = await Promise.all(Array.from({ length: CERTIFICATES - 1 }, (_, n) => pki.issueClient(`of acme ${n}`)));
  for (const each of others) await addCertificate(store, clock, "acme", each.cert);
  const unlimited = { maxPerTransaction: null, dailyCeiling: null };
  await addAccount(store, clock, { name: "honest", certificate: pki.otherClient.cert, ...unlimited });

  const held: Client[] = [];
  for (const identity of [pki.client, ...others]) {
    for (;;) {
      const client = port.dial(identity);
      client.socket.write(head("GET", "/healthz"));
      const answered = await Promise.race([client.answers(1), client.closed.then(() => "")]);
      if (!answered.startsWith("HTTP/1.1 200")) break;
      held.push(client);
    }
  }
  const honest = port.dial(pki.otherClient);
  honest.socket.write(head("GET", "/healthz"));
  const answer = await Promise.race([honest.answers(1), honest.closed.then(() => "refused")]);
  expect([held.length < CONNECTIONS, answer.slice(0, 12)]).toEqual([true, "HTTP/1.1 200"]);
  for (const client of [honest, ...held]) client.destroy();
});
