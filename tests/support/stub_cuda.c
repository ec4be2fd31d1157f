/* A libcuda for tests of runtime/device_driver.py: memory is the host's, kernels do at once what the PTX does, and
   every call checks the arguments that it can, so that a wrong order or size of them shows. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
typedef uint64_t D;
int cuCtxGetCurrent(void**c){*c=(void*)0x11;return 0;}
int cuCtxGetDevice(int*d){*d=3;return 0;}
int cuCtxGetStreamPriorityRange(int*a,int*b){*a=0;*b=-5;return 0;}
int cuDeviceGetAttribute(int*v,int a,int d){*v=(a==75&&d==3)?9:(a==76?0:-1);return 0;}
int cuGetErrorName(int e,const char**s){*s="CUDA_ERROR_STUB";return 0;}
static int loads;
int cuModuleLoadData(void**m,const char*img){*m=(void*)0x77;loads++;return strncmp(img,".version",8)?218:0;}
int cuModuleGetFunction(void**f,void*m,const char*n){ if(m!=(void*)0x77) return 1; *f=!strcmp(n,"specmeter_stamp")?(void*)1:!strcmp(n,"specmeter_now")?(void*)2:(void*)3;return 0;}
int cuMemAlloc_v2(D*p,size_t n){*p=(D)malloc(n);memset((void*)*p,0xa5,n);return 0;}
int cuMemHostAlloc(void**p,size_t n,unsigned f){if(f!=3)return 1;*p=calloc(1,n);return 0;}
int cuMemHostGetDevicePointer_v2(D*d,void*p,unsigned f){*d=(D)p;return f;}
int cuMemsetD8Async(D p,unsigned char v,size_t n,void*s){memset((void*)p,v,n);return s==(void*)0x55?0:1;}
int cuMemcpyDtoHAsync_v2(void*d,D s,size_t n,void*st){memcpy(d,(void*)s,n);return 0;}
int cuStreamCreateWithPriority(void**s,unsigned f,int p){*s=(void*)0x55;return (f==1&&p==-5)?0:1;}
int cuStreamQuery(void*s){return 0;}
static uint64_t t=1790000000000000000ull;
static int live;
int live_now(void){return live;}
int cuEventCreate(void**e,unsigned f){if(f==2){*e=(void*)0x99;return 0;} *e=calloc(1,8);live++;return f;}
int cuEventRecord(void*e,void*s){if(s!=(void*)0x55)return 1; if(e!=(void*)0x99)*(uint64_t*)e=t; return 0;}
int cuEventQuery(void*e){static int n;return n++%2?0:600;}
int cuEventElapsedTime(float*ms,void*a,void*b){*ms=(float)((*(uint64_t*)b-*(uint64_t*)a)/1e6);return 0;}
int cuEventDestroy_v2(void*e){free(e);live--;return 0;}
/* A graph is the number of kernels that were launched on the capturing stream; a launch of it takes 1000 ns each. */
static void*capturing; static uint64_t kept;
int cuStreamBeginCapture_v2(void*s,int m){if(s!=(void*)0x55||m!=2||capturing)return 1; capturing=s;kept=0;return 0;}
int cuStreamEndCapture(void*s,void**g){if(s!=capturing)return 1; uint64_t*p=malloc(8);*p=kept;*g=p;capturing=0;live++;return 0;}
int cuGraphInstantiateWithFlags(void**x,void*g,unsigned long long f){uint64_t*p=malloc(8);*p=*(uint64_t*)g;*x=p;live++;return f!=0;}
int cuGraphLaunch(void*x,void*s){if(s!=(void*)0x55||capturing)return 1; t+=1000**(uint64_t*)x;return 0;}
int cuGraphDestroy(void*g){free(g);live--;return 0;}
int cuGraphExecDestroy(void*x){free(x);live--;return 0;}
static int mode=0;
int cuThreadExchangeStreamCaptureMode(int*m){int t=mode;mode=*m;*m=t;return 0;}
int mode_now(void){return mode;}
int cuLaunchKernel(void*f,unsigned a,unsigned b,unsigned c,unsigned d,unsigned e,unsigned g,unsigned sh,void*st,void**p,void**x){
 if(a*b*c*d*e*g!=1||sh||x) return 1; if(capturing&&st==capturing){kept++;return 0;} t+=1000;
 if(f==(void*)1){uint64_t*ctr=*(uint64_t**)p[0];char*rows=*(char**)p[1];uint32_t*rep=*(uint32_t**)p[2];uint32_t mask=*(uint32_t*)p[3],num=*(uint32_t*)p[4],what=*(uint32_t*)p[5],who=*(uint32_t*)p[6];
  if(rep){ if(what&0x20000) num=++*rep; else num=*rep;}
  uint64_t s=(*ctr)++; uint32_t mk=(uint32_t)s+1; char*r=rows+(s&mask)*32; memcpy(r,&t,8);memcpy(r+8,&mk,4);memcpy(r+12,&what,4);memcpy(r+16,&num,4);memcpy(r+20,&who,4);memcpy(r+24,&mk,4);}
 else if(f==(void*)2) **(uint64_t**)p[0]=t; else **(uint64_t**)p[0]=32; return 0;}
