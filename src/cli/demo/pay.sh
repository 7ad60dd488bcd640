node --input-type=module -e '
import { wrapFetchWithPayment } from "x402-fetch";
import { privateKeyToAccount } from "viem/accounts";
const { GATEWAY, TOKEN, AGENT, PAYER_KEY } = process.env;
const pay = wrapFetchWithPayment(fetch, privateKeyToAccount(PAYER_KEY));
const url = GATEWAY + "/v1/proxy/" + AGENT, headers = { Authorization: "Bearer " + TOKEN };
const paid = await pay(url, { method: "POST", headers, body: "hello" });
const { invocation_id } = await paid.json();
const poll = { headers: { ...headers, Prefer: "wait=20" } };
const call = await (await fetch(url + "/invocations/" + invocation_id, poll)).json();
console.log(paid.status, call, atob(call.response_body_b64));
'
