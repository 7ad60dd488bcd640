// One trace of a paid call, across both services as they are deployed and the upstream, on a real chain with the real
// token. The collector decodes by OpenTelemetry's own definitions: see support/http/collector.ts.
import { afterAll, beforeAll, expect, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { openPayingTenant, type PayingTenant } from "../support/chain/paying.ts";
import { newPayer, signPayment } from "../support/chain/payments.ts";
import { type Gateway, startGateway } from "../support/gateway/gateway.ts";
import { temporaryRoot } from "../support/gateway/process.ts";
import { SERVER, TEST_CA } from "../support/http/certificates.ts";
import { type CollectedSpan, type Collector, startCollector } from "../support/http/collector.ts";
import { startUpstream, type Upstream } from "../support/http/upstream.ts";

const TRACE = "0af7651916cd43dd8448eb211c80319c";
const PARENT = "b7ad6b7169203331";
const PRICE = 10_000n;

let chain: TestChain;
let collector: Collector;
let facilitator: Facilitator;
let gateway: Gateway;
let tenant: PayingTenant;
let upstream: Upstream;
let named: string | null = null;

beforeAll(async () => {
  chain = await startChain();
  collector = startCollector(SERVER);
  const caFile = join(temporaryRoot(), "collector-ca.pem");
  writeFileSync(caFile, TEST_CA);
  upstream = startUpstream(({ headers }) => {
    named = headers.get("traceparent");
    return Response.json({});
  });
  const env = { OTEL_EXPORTER_OTLP_ENDPOINT: collector.url, TOLLGATE_CA_FILE: caFile };
  // A key in the URL of a node, as operators have them.
  const rpcUrls = [`${chain.url}/?key=s3cret-of-the-node`];
  [facilitator, gateway] = await Promise.all([
    startFacilitator(chain, { env, rpcUrls }),
    startGateway({ env: { ...env, TOLLGATE_SETTLE_WAIT_MS: "4000" } }),
  ]);
  tenant = await openPayingTenant(gateway, facilitator);
});

afterAll(async () => {
  await gateway?.[Symbol.asyncDispose]();
  await facilitator?.[Symbol.asyncDispose]();
  await upstream?.stop();
  await collector?.[Symbol.asyncDispose]();
  await chain?.stop();
});

async function paidCall(trace: string, path = "") {
  const payer = newPayer();
  const payTo = newPayer().address;
  await chain.fundUsdc(payer.address, PRICE);
  const agent = await tenant.agent({
    upstream_url: upstream.url,
    pricing: { amount: `${PRICE}`, asset: "USDC", network: "base", pay_to: payTo },
  });
  const { header } = await signPayment(payer, { to: payTo, value: PRICE });
  const answer = await fetch(`${tenant.callUrl(agent)}${path}`, {
    method: "POST",
    headers: { ...tenant.headers, "x-payment": header, traceparent: `00-${trace}-${PARENT}-01` },
    body: "{}",
  });
  await answer.bytes();
  return { status: answer.status, header, invocation: answer.headers.get("x-service-invocation-id") ?? "" };
}

/** Waits for the span of this trace. */
const span = (traceId: string, name: string, kind: CollectedSpan["kind"]) =>
  collector.span((each) => each.traceId === traceId && each.name === name && each.kind === kind);

test.each(["", "/stream"])(
  "a call of /v1/proxy/{id}%s has one trace, from its caller to the chain and the upstream",
  async (path) => {
    const trace = crypto.randomUUID().replaceAll("-", "");
    const { status, header, invocation } = await paidCall(trace, path);
    expect(status).toBe(path === "" ? 202 : 200);
    const server = await span(trace, `POST /v1/proxy/{id}${path}`, "SERVER");
    const asking = await span(trace, "POST /settle", "CLIENT");
    const settling = await span(trace, "POST /settle", "SERVER");
    const calling = await span(trace, "POST", "CLIENT");
    const signing = await span(trace, "sign and store", "INTERNAL");
    const waiting = await span(trace, "wait for inclusion", "INTERNAL");
    const simulating = await span(trace, "eth_estimateGas", "CLIENT");
    const sending = await span(trace, "eth_sendRawTransaction", "CLIENT");
    expect(server.parentSpanId).toBe(PARENT);
    expect([asking.parentSpanId, calling.parentSpanId]).toEqual([server.spanId, server.spanId]);
    expect(settling.parentSpanId).toBe(asking.spanId);
    for (const part of [signing, waiting, simulating, sending]) {
      expect([part.name, part.parentSpanId]).toEqual([part.name, settling.spanId]);
    }
    expect(named).toBe(`00-${trace}-${calling.spanId}-01`);
    expect([server.service, asking.service, settling.service]).toEqual([
      "tollgate-gateway",
      "tollgate-gateway",
      "tollgate-facilitator",
    ]);
    expect(asking.attributes).toMatchObject({
      "http.response.status_code": 200,
      "server.address": "127.0.0.1",
      "tollgate.invocation.id": invocation,
      "tollgate.settlement.attempt": 1,
      "tollgate.settlement.outcome": "collected",
    });
    expect(settling.attributes).toEqual({
      "http.request.method": "POST",
      "http.route": "/settle",
      "http.response.status_code": 200,
      "tollgate.account": "gateway",
    });
    expect(sending.attributes).toEqual({ "rpc.method": "eth_sendRawTransaction", "tollgate.rpc.endpoint": 0 });
    const all = Buffer.concat(collector.requests.map(({ bytes }) => bytes)).toString("latin1");
    for (const secret of ["s3cret-of-the-node", header, facilitator.client.key]) expect(all).not.toContain(secret);
  },
);

test("a payment that is settled later, by another process, is a part of the trace of its call", async () => {
  await facilitator.kill9();
  const { status, invocation } = await paidCall(TRACE);
  expect(status).toBe(202);
  const first = await span(TRACE, "POST /settle", "CLIENT");
  expect([first.isError, first.attributes["tollgate.settlement.attempt"]]).toEqual([true, 1]);
  const server = await span(TRACE, "POST /v1/proxy/{id}", "SERVER");
  await gateway.kill9();
  await facilitator.restart();
  await gateway.restart();
  const settled = await collector.span(
    ({ traceId, attributes }) => traceId === TRACE && attributes["tollgate.settlement.outcome"] === "collected",
  );
  expect(settled.parentSpanId).toBe(server.spanId);
  const calling = await collector.span(
    ({ name, attributes }) => name === "POST" && attributes["tollgate.invocation.id"] === invocation,
  );
  expect([calling.traceId, calling.parentSpanId]).toEqual([TRACE, server.spanId]);
});
