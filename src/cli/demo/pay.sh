(cd "$FILES" && npm install --loglevel=error --no-fund --prefix . \
  @x402/fetch@2.27.0 @x402/evm@2.27.0 viem@2.57.1 && node --input-type=module -e '
import { wrapFetchWithPayment, x402Client } from "@x402/fetch";
import { registerExactEvmScheme } from "@x402/evm/exact/client";
import { privateKeyToAccount } from "viem/accounts";
const { GATEWAY, TOKEN, AGENT, PAYER_KEY } = process.env;
const client = registerExactEvmScheme(new x402Client(), { signer: privateKeyToAccount(PAYER_KEY) });
const pay = wrapFetchWithPayment(fetch, client);
const url = GATEWAY + "/v1/proxy/" + AGENT, headers = { Authorization: "Bearer " + TOKEN };
const paid = await pay(url, { method: "POST", headers, body: "hello" });
const { invocation_id } = await paid.json();
const poll = { headers: { ...headers, Prefer: "wait=20" } };
const call = await (await fetch(url + "/invocations/" + invocation_id, poll)).json();
console.log(paid.status, call, atob(call.response_body_b64));
')
