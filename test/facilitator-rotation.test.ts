// Certificates are renewed while both services run: those of the gateway by two commands, those of the facilitator by
// writing its files anew. No call fails for it, and no payment is told otherwise than it is.

import { afterAll, beforeAll, expect, test } from "bun:test";
import { copyFileSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { connect } from "node:tls";
import { startChain, type TestChain } from "./support/chain/chain.ts";
import { type Client, type Facilitator, startFacilitator } from "./support/chain/facilitator.ts";
import { newPayer, signPayment } from "./support/chain/payments.ts";
import { type Gateway, startGateway } from "./support/gateway/gateway.ts";
import { openPaidAgent, type PaidUpstream, startPaidUpstream } from "./support/stores/paid-calls.ts";
import { until } from "./support/until.ts";

const VALUE = 10_000n;

let chain: TestChain;
let facilitator: Facilitator;
let gateway: Gateway;
let upstream: PaidUpstream;
let pki: string;

beforeAll(async () => {
  chain = await startChain();
  [facilitator, gateway] = await Promise.all([
    startFacilitator(chain),
    startGateway({ env: { TOLLGATE_SETTLE_WAIT_MS: "1000" } }),
  ]);
  upstream = startPaidUpstream(chain);
  pki = join(dirname(facilitator.dataDir), "pki");
});

afterAll(async () => {
  await gateway?.[Symbol.asyncDispose]();
  await upstream?.stop();
  await facilitator?.[Symbol.asyncDispose]();
  await chain?.stop();
});

async function tollgate(...args: readonly string[]): Promise<string> {
  const { code, stdout, stderr } = await facilitator.run(...args);
  expect([args.join(" "), code, stderr]).toEqual([args.join(" "), 0, ""]);
  return stdout;
}

/** A certificate that no account has. */
async function issue(name: string, dir = pki): Promise<Client> {
  await tollgate("pki", "client", "--dir", dir, "--name", name);
  const read = (file: string) => readFileSync(join(dir, file), "utf8");
  const [cert, key, bundle] = [read(`${name}.crt`), read(`${name}.key`), read(`${name}.pem`)];
  return { name, cert, key, bundle, ca: read("ca.crt") };
}

async function payment() {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, VALUE);
  return signPayment(payer, { to: newPayer().address, value: VALUE });
}

test("the certificates of an account change without a gap, while a payment of it is under way", async () => {
  const agent = await openPaidAgent({ chain, gateway, facilitator, upstream });
  const next = await issue("gateway-2");
  const open = await facilitator.connect(next);
  expect((await open.settle({})).status).toBe(403);
  await tollgate("account", "add-cert", "gateway", "--cert", join(pki, "gateway-2.crt"));
  expect((await open.settle({})).status).toBe(400);

  await chain.pauseMining();
  const call = await agent.call();
  await chain.mine();
  const [answer] = await Promise.all([
    call.send(),
    until(() => facilitator.payment(call.nonce)?.["status"] === "sent"),
  ]);
  expect(answer.status).toBe(202);
  const { body } = await agent.tenant.send("GET", "/v1/settlement/config");
  const credential = `/v1/credentials/${body.facilitator_credential_ref}`;
  expect((await agent.tenant.send("PUT", credential, { plaintext: next.bundle })).status).toBe(200);
  await tollgate("account", "remove-cert", "gateway", "--cert", join(pki, "gateway.crt"));
  expect((await facilitator.settle({})).status).toBe(403);
  // Another account, which has the same authorization, is told no more than that it may have landed.
  const other = await facilitator.addAccount("other");
  const told = await facilitator.settle(call.payment.settleRequest, other);
  const { transaction_hash: transaction } = facilitator.payment(call.nonce) ?? {};
  expect([told.status, told.body]).toMatchObject([200, { success: false, transaction }]);
  await chain.resumeMining();
  await chain.mine();
  const view = await call.ended(answer.body.invocation_id);
  expect(view).toMatchObject({
    status: "succeeded",
    settlement: { status: "settled", tx_hash: transaction },
  });
  expect((await facilitator.settle(call.payment.settleRequest, other)).body).toMatchObject({
    success: false,
    transaction,
  });
  expect(await tollgate("account", "list")).toContain("gateway");
  await tollgate("account", "add-cert", "gateway", "--cert", join(pki, "gateway.crt"));
  open.close();
  agent.door.stop();
});

test("the facilitator takes up its own certificate and its clients' CAs when the files change", async () => {
  const home = dirname(pki);
  const [renewed, together] = [join(home, "pki-2"), join(home, "together.crt")];
  await tollgate("pki", "init", "--dir", renewed);
  await tollgate("pki", "server", "--dir", renewed, "--host", "127.0.0.1");
  const late = await issue("late", renewed);
  await tollgate("account", "add-cert", "gateway", "--cert", join(renewed, "late.crt"));
  const old = readFileSync(join(pki, "ca.crt"), "utf8");
  writeFileSync(together, old + late.ca);
  const everybody = old + late.ca;

  const shown = () =>
    new Promise<string>((resolve, reject) => {
      const { hostname: host, port } = new URL(facilitator.url);
      const { cert, key } = facilitator.client;
      const socket = connect({ host, port: Number(port), cert, key, ca: everybody }, () => {
        resolve(socket.getPeerCertificate().fingerprint256);
        socket.destroy();
      });
      socket.on("error", reject);
    });
  const before = await shown();
  const open = await facilitator.connect();
  await chain.pauseMining();
  const paid = await payment();
  await chain.mine();
  const underWay = open.settle(paid.settleRequest);
  await until(() => facilitator.payment(paid.authorization.nonce)?.["status"] === "sent");

  // A certificate without its key stays out, and is told once.
  copyFileSync(join(renewed, "server.crt"), join(pki, "server.crt"));
  await until(() => facilitator.lines("tls_files_refused").length > 0);
  expect(await shown()).toBe(before);
  copyFileSync(join(renewed, "server.key"), join(pki, "server.key"));
  copyFileSync(together, join(pki, "ca.crt"));
  await until(async () => (await shown()) !== before);
  const [newcomer, goesOn] = [
    { ...late, ca: everybody },
    { ...facilitator.client, ca: everybody },
  ];
  expect((await facilitator.settle({}, newcomer)).status).toBe(400);
  expect((await facilitator.settle({}, goesOn)).status).toBe(400);
  await chain.resumeMining();
  await chain.mine();
  expect((await underWay).body).toMatchObject({ success: true });
  expect((await open.settle({})).status).toBe(400);

  // The old CA goes, and with it whoever it has vouched for.
  copyFileSync(join(renewed, "ca.crt"), join(pki, "ca.crt"));
  await until(async () => (await open.settle({}).catch(() => null)) === null);
  expect(await facilitator.settle({}, goesOn).catch(() => "refused")).toBe("refused");
  expect((await facilitator.settle({}, newcomer)).status).toBe(400);
  expect(facilitator.lines("tls_files_refused")).toHaveLength(1);
  // The log is written behind.
  await until(() => facilitator.lines("tls_files_taken").length >= 2);
});
